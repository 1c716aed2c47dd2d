"""What the operator may change of a gateway while it serves: limits, classes, replicas in use.

Called by ``wiring``, which knows what the settings say. What a change means for requests is the
fleet's decision.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from sluice.cluster.auto_route import AutoRoute, Classifier
from sluice.cluster.calls import AnyModel
from sluice.cluster.classes import ServiceClasses
from sluice.cluster.fleet_driver import FleetDriver
from sluice.cluster.members import Launch
from sluice.cluster.observer import Observer
from sluice.cluster.overview import Clocks, Overview
from sluice.core.events import Reconfigured
from sluice.core.limits import RouteLimits
from sluice.telemetry.records import Deployment


class Operated:
    """A gateway as its operator sees it."""

    def __init__(
        self, driver: FleetDriver, models: Mapping[str, AnyModel], observer: Observer
    ) -> None:
        self._driver = driver
        self._models = models
        self._observer = observer

    def reconfigure(
        self,
        limits: Reconfigured,
        classes: Mapping[str, ServiceClasses],
        launch: Launch,
        told: Deployment,
    ) -> None:
        """Hold to other limits, and to other classes by model.

        ``launch`` makes replicas that are new. ``told`` goes into the journal.
        """
        self._driver.reconfigure(limits, launch)
        for name, served in self._models.items():
            served.classes = classes[name]
            self._observer.know_classes(classes[name].targets)
        self._observer.changed(told)

    def routes(
        self,
        limits: Mapping[str, RouteLimits],
        classifiers: Mapping[str, Classifier],
        known: Mapping[str, AutoRoute] = MappingProxyType({}),
    ) -> dict[str, AutoRoute]:
        """Names that stand for two models; the fleet holds to their limits already.

        Those that are ``known`` go on with what they remember.
        """
        made = dict[str, AutoRoute]()
        for name, one in limits.items():
            if name in known:
                made[name] = known[name]
                made[name].hold(one, classifiers[name])
            else:
                made[name] = AutoRoute(
                    one, classifiers[name], self._driver, self._models, self._observer
                )
        return made

    def drain_replica(self, replica_id: str, *, on: bool) -> None:
        """Give a replica nothing more, or use it again. Raises ``KeyError`` for an unknown id."""
        self._driver.drain_replica(replica_id, on=on)
        verb = "drain" if on else "undrain"
        self.note(Deployment(0, verb, {"replica": replica_id}))

    def pin_replicas(self, model: str, number: int | None) -> None:
        """Let so many replicas of a model serve, or leave it to the load again (``None``)."""
        self._driver.pin_replicas(model, number)
        told = "by the load" if number is None else str(number)
        self.note(Deployment(0, "scale", {"model": model, "replicas": told}))

    @property
    def deployment(self) -> Deployment:
        """What is served since the last change of it."""
        return self._observer.deployment

    def overview(self, clocks: Clocks) -> Overview:
        """What a person wants to see of it, from this moment on."""
        return Overview(self._observer, self._driver.pools, clocks)

    def count_spans(self, counted: Callable[[], tuple[int, int]]) -> None:
        """Show in the metrics how many spans were exported and dropped."""
        self._observer.metrics.count_spans = counted

    def note(self, event: Deployment) -> None:
        """Put something that happened at this moment into the journal."""
        self._observer.changed(event)
