"""/admin/experiments: compare two policy sets on live traffic. Scope `admin`; every order is audited."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from penstock.api.admin.audit import audit
from penstock.api.admin.fleet import WhichModel
from penstock.api.http.answers import private_json
from penstock.api.http.routes import Operation
from penstock.core.errors import ConfigError, InvalidRequest
from penstock.core.experiment_view import ExperimentControl, ExperimentOrder, ExperimentView
from penstock.core.policy import PolicySet, policy_of
from penstock.gateway.settings.live import LiveSettings
from penstock.gateway.store.database import Database

_Share = Annotated[float, Meta(gt=0, lt=1)]


class NewExperiment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two policy sets by name; `default` stands for the settings that the server was started with."""

    a: str
    b: str
    model: str | None = None  # by the name that it is served under; None: the only one
    share: _Share = 0.5  # of requests, for b
    window_s: float | None = None
    min_windows: int | None = None
    max_duration_s: float | None = None
    confidence: float | None = None


class ExperimentObject(ExperimentView, frozen=True, kw_only=True):
    object: str = "experiment"


class ExperimentList(msgspec.Struct, frozen=True):
    """One experiment for each model: the one in progress, or else the last one."""

    data: list[ExperimentObject]
    object: str = "list"


class ExperimentEndpoints:
    def __init__(self, control: ExperimentControl, settings: LiveSettings, database: Database) -> None:
        self._control = control
        self._settings = settings
        self._database = database

    def routes(self) -> list[Operation]:
        return [
            Operation("GET /admin/experiments", self.list_experiments, ExperimentList),
            Operation("POST /admin/experiments", self.start, ExperimentObject, reads=NewExperiment),
            Operation(
                "POST /admin/experiments/stop", self.stop, ExperimentObject, reads=WhichModel, default=b"{}"
            ),
        ]

    async def list_experiments(self, request: Request) -> Response:
        views = await self._control.experiments()
        return private_json(ExperimentList([_shown(view) for view in views]))

    async def start(self, request: Request, new: NewExperiment) -> Response:
        order = ExperimentOrder(
            model=new.model,
            a=new.a,
            b=new.b,
            policy_a=self._policy(new.a, "a"),
            policy_b=self._policy(new.b, "b"),
            objective=self._settings.current.objective,
            config={
                name: value
                for name in ("share", "window_s", "min_windows", "max_duration_s", "confidence")
                if (value := getattr(new, name)) is not None
            },
        )
        return await self._done(request, "experiment.start", await self._control.start_experiment(order))

    async def stop(self, request: Request, which: WhichModel) -> Response:
        return await self._done(request, "experiment.stop", await self._control.stop_experiment(which.model))

    def _policy(self, name: str, param: str) -> PolicySet:
        try:
            return policy_of(self._settings.current.policies, name)
        except ConfigError as error:
            raise InvalidRequest(error.message, param=param, hint=error.hint) from error

    async def _done(self, request: Request, action: str, view: ExperimentView) -> Response:
        shown = _shown(view)
        await audit(self._database, request, action, view.id, shown)
        return private_json(shown)


def _shown(view: ExperimentView) -> ExperimentObject:
    return ExperimentObject(**msgspec.structs.asdict(view))
