"""The entry point of the `penstock` command."""

from __future__ import annotations


def main() -> None:
    from penstock.cli.commands import penstock

    penstock(prog_name="penstock")


if __name__ == "__main__":
    main()
