"""What torch and the kernels say about this machine, as JSON on standard output.

`penstock doctor` runs it in a process of its own: importing torch takes seconds, and a broken installation may
end the process that tries.
"""

from __future__ import annotations

import dataclasses
import json


def main() -> None:
    import torch

    from penstock.kernels.select import capabilities

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found = {"torch": torch.__version__, "gpus": gpus, "kernels": dataclasses.asdict(capabilities())}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
