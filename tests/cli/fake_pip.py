"""Stands in for `python -m pip`: serves wheels from the folder `wheels` beside itself, or misbehaves.

The file `behaviour` beside it says how. Every call adds a line to `calls`. Written by the fixture `fake_pip` into
a package called `pip`, so that a process with it on PYTHONPATH uses it as well.
"""

import os
import shutil
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
behaviour = (HERE / "behaviour").read_text() if (HERE / "behaviour").exists() else "good"
requirement = sys.argv[-1]
target = Path(next(word for word in sys.argv if word.startswith("--dest=")).removeprefix("--dest="))
wheel = HERE / "wheels" / f"{requirement.replace('==', '-')}-py3-none-any.whl"

with (HERE / "calls").open("a") as calls:
    calls.write(f"{requirement} {os.getpid()}\n")

if behaviour == "no-pip":
    sys.exit("/usr/bin/python: No module named pip")
if behaviour == "offline":
    sys.exit(f"WARNING: retrying\nERROR: No matching distribution found for {requirement}")
if behaviour == "full":
    sys.exit("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device")
if behaviour == "hang":
    (Path(os.environ["TMPDIR"]) / "half.whl").write_bytes(b"x" * 1000)
    (HERE / "hanging").touch()
    time.sleep(60)
while behaviour == "held" and not (HERE / "let-go").exists():
    time.sleep(0.02)
if behaviour == "backwards":  # later parts arrive first
    time.sleep(0.6 if requirement.startswith("part1=") else 0)

shutil.copy(wheel, target)
if behaviour == "corrupt":
    arrived = target / wheel.name
    data = bytearray(arrived.read_bytes())
    data[len(data) // 3] ^= 0xFF
    arrived.write_bytes(data)
if behaviour == "truncate":
    arrived = target / wheel.name
    arrived.write_bytes(arrived.read_bytes()[: wheel.stat().st_size // 2])
