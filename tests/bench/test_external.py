"""The tables of the benchmark before an external server."""

from __future__ import annotations

from dataclasses import replace

from bench.external import DIRECT, FULL, ROUTER, Figures, least_table, medians, table

ROW = Figures(0.5, 1.0, 1000.0, 500.0, 200.0, 300.0, 0.5, 1.0)


def test_the_least_disturbed_round_may_differ_for_requests_and_streams() -> None:
    rounds = {
        DIRECT: [ROW],
        ROUTER: [ROW],
        FULL: [
            replace(ROW, cpu_us_per_request=400.0, interruptions_per_request=0.1),
            replace(ROW, cpu_us_per_request=900.0, cpu_us_per_stream=450.0),
            replace(ROW, cpu_us_per_request=800.0, cpu_us_per_stream=600.0),
        ],
    }
    rounds[FULL][0] = replace(rounds[FULL][0], cpu_us_per_stream=700.0)
    last = least_table(rounds).splitlines()[-1]
    assert last == f"| {FULL} | 400 (2.00 ×) | 0.10 | 450 (1.50 ×) | 1.00 |"
    assert DIRECT not in least_table(rounds)
    assert "800 (4.00 ×) | 600 (2.00 ×)" in table({name: medians(found) for name, found in rounds.items()})


def test_without_a_router_there_are_no_ratios() -> None:
    assert least_table({DIRECT: [ROW], FULL: [ROW]}).splitlines()[-1].count("×") == 0
