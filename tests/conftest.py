from __future__ import annotations

import atexit
import gc
import logging
import os
import ssl
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from _pytest.terminal import TerminalReporter
from hypothesis import HealthCheck, settings

from .copies import copy_from_here
from .workers import Workers

# Without a GPU, Triton's kernels run in its interpreter (tests/triton), which is chosen for good when triton is first
# imported, and other libraries import it too.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Threads of these libraries spin while they wait, and other tests need the cores. The libraries read this when they
# are loaded, also in processes that tests start.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's

# A busy machine is no defect: drawing examples and running them may take any time. Tests that name checks of their
# own replace these.
settings.register_profile(
    "patient",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("exhaustive", settings.get_profile("patient"), max_examples=1000)
settings.load_profile("patient")

# Collecting imports millions of objects that all stay. See `pytest_collection`.
gc.disable()

# Two slow cores compute a prompt of 2,000 tokens in a minute or two while other tests run.
E2E_TIMEOUT_S = 1200
CLIENT_TIMEOUT_S = 60.0
# These files take longest, in one process each.
LONG_FILES = (
    "tests/triton/test_interpreted.py",
    "tests/models/test_families.py",
    "tests/engine/test_model_drafts.py",
    "tests/engine/test_drafts.py",
    "tests/triton/",
    "tests/simulator/",
    "tests/engine/test_images.py",
    "tests/api/test_openapi.py",
    "tests/kernels/test_attention.py",
    "tests/e2e/",
    "tests/engine/parallel/",
    "tests/cluster/",
    "tests/deploy/",
    "tests/clients/",
)
# Tests in these folders mostly wait for the processes that they start.
WAITING = ("e2e", "engine/parallel", "cluster", "deploy", "clients", "serve", "cli", "gateway/store")
# Tests in these files share a server with the default model. One worker takes them all, and starts the server once.
SHARING_A_SERVER = tuple(f"tests/e2e/test_{name}.py" for name in ("readme", "serve", "structured_output"))


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Commands that a test runs in this process set the level of all logs, which later tests compare."""
    level = logging.root.level
    yield
    if logging.root.level != level:  # all loggers then forget what they have looked up
        logging.root.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def nobodys_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Servers that tests start keep their data here, and not where the user's own server has its keys."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session", autouse=True)
def patient_and_quick_clients() -> None:
    """Clients share one TLS context. Each would read all certificates, and most of them speak plain HTTP then. Those
    that name no timeout wait longer than the usual five seconds: a busy machine is no defect."""
    for library in ("httpx", "httpx2"):  # those of the SDKs too
        transports: Any = sys.modules.get(f"{library}._transports.default")
        if transports is not None:
            transports.create_ssl_context = shared_by_default(transports.create_ssl_context)
            # One object, which is the value of default arguments.
            timeout = sys.modules[f"{library}._config"].DEFAULT_TIMEOUT_CONFIG
            timeout.connect = timeout.read = timeout.write = timeout.pool = CLIENT_TIMEOUT_S


def shared_by_default(create: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
    contexts: dict[tuple[object, ...], ssl.SSLContext] = {}

    def shared(verify: object = True, cert: object = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is not True or cert is not None:
            return create(verify=verify, cert=cert, trust_env=trust_env)
        key = (trust_env, *map(os.environ.get, ("SSL_CERT_FILE", "SSL_CERT_DIR")))
        if key not in contexts:
            contexts[key] = create(trust_env=trust_env)
        return contexts[key]

    return shared


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models spend more time handing work to threads than doing it. Engines take `num_threads` instead."""
    from penstock.kernels.library import available_cores
    from penstock.kernels.select import set_num_threads  # imports torch, which most tests do without

    set_num_threads(1)
    yield
    set_num_threads(available_cores())


@pytest.fixture(scope="module")
def torch_uses_one_thread() -> Iterator[None]:
    """Torch's threads spin while they wait for each other, longer than they work on small tensors. The native library
    keeps threads of its own."""
    import torch

    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of the real server time on a slow machine, and begin with the longest files: workers take whole
    files, and all but one would be idle if a long file came last."""
    items.sort(key=lambda item: next((at for at, part in enumerate(LONG_FILES) if part in item.nodeid), 99))
    for item in items:
        if item.get_closest_marker("e2e") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(E2E_TIMEOUT_S))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keep the garbage collector from looking through the imported modules: it would take a third of the time of
    collecting, and time in every test after that. Keep tokenizers from starting threads, which a forked worker would
    not have."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TOKENIZERS_PARALLELISM", "false")
            collected = yield
            if session.config.option.workers >= 2 and "torch" in sys.modules:
                # torch.testing needs it, and the import takes nearly a second in each worker.
                import_module("torch.distributed.tensor")
            return collected
    finally:
        let_logs_of_torch_propagate()
        gc.freeze()
        gc.set_threshold(10_000)  # tests make many objects, and few cycles
        gc.enable()
        atexit.register(gc.unfreeze)  # native libraries report what is still alive after that


def let_logs_of_torch_propagate() -> None:
    """Six times a test, pytest gives a handler to each logger that does not propagate. Torch has fifty of those."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="run the tests in this many processes")
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="try ten times as many examples, and compile recorded kernels",
    )
    parser.addoption(
        "--write-table", action="store_true", help="write what was found to docs/models.md or docs/clients.md"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("exhaustive"):
        settings.load_profile("exhaustive")
    if config.getoption("write_table"):
        from tests.models.family_table import FamilyTable  # imports torch, which most tests do without

        config.pluginmanager.register(FamilyTable())


@pytest.fixture
def shows(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Name a cell of the table of families in docs/models.md that the test fills, and what the cell says then:
    `shows(family, column, text)`. Without a family: what the cells of a column say that no other test fills."""

    def show(family: str, column: str, text: str = "✓") -> None:
        record_property("cell", (family, column, text))

    return show


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    option = session.config.option
    if option.workers < 2 or option.collectonly or option.usepdb or session.testsfailed:
        return None
    begin = without_threads_of_kernels()
    copy_from_here()
    return Workers(session, option.workers, SHARING_A_SERVER, begin, mostly_waits).run()


def mostly_waits(file: str) -> bool:
    return file.startswith(tuple(f"tests/{folder}/" for folder in WAITING))


def without_threads_of_kernels() -> Callable[[], None]:
    """End the threads of this process, which a forked worker would not have. Returns what the worker calls to start
    threads of its own."""
    select: Any = sys.modules.get("penstock.kernels.select")
    if select is None:
        return lambda: None
    count = select.capabilities().num_threads
    select.set_num_threads(1)
    return lambda: select.set_num_threads(count)


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Say why tests were skipped, each reason once with its number."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in skipped
        if isinstance(report.longrepr, tuple)
    )
    if reasons:
        terminalreporter.section("skipped, and why")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5}  {reason}")
