"""A Ray cluster of several nodes on this machine, small, and gone when the tests are over.

Nodes have no real processors of their own: what they promise is made up, so that it can be seen
what is placed where.
"""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

NODE_CPUS = 2
_OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes


class SmallCluster:
    """A head that has no processors, and nodes that come and go."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster  # noqa: PLC0415 - takes half a second

        self._cluster = Cluster(
            initialize_head=True,
            head_node_args=self._node(0) | {"include_dashboard": False},
        )
        self.address: str = self._cluster.address
        self.nodes: list[Any] = []

    @staticmethod
    def _node(cpus: int) -> dict[str, Any]:
        return {
            "num_cpus": cpus,
            "num_gpus": 0,
            "memory": 2 << 30,
            "object_store_memory": _OBJECT_STORE_BYTES,
        }

    def add(self) -> Any:
        """One more node."""
        return self._cluster.add_node(**self._node(NODE_CPUS), wait=False)

    def lose(self, node: Any) -> None:
        """Kill a node with all that runs on it, as a machine that loses its power."""
        self._cluster.remove_node(node, allow_graceful=False)

    def free(self) -> None:
        """End the actors that earlier tests have left, which wait for a gateway."""
        import ray  # noqa: PLC0415 - as above

        ray.init(
            address=self.address,
            namespace="sluice",
            ignore_reinit_error=True,
            log_to_driver=False,
            configure_logging=False,
        )
        for one in ray.util.list_named_actors(all_namespaces=True):
            with contextlib.suppress(ValueError):  # it ended in between
                ray.kill(ray.get_actor(one["name"], namespace=one["namespace"]))

    def close(self) -> None:
        """End every process of the cluster."""
        import ray  # noqa: PLC0415 - as above

        ray.shutdown()
        self._cluster.shutdown()


@contextlib.contextmanager
def small_cluster() -> Iterator[SmallCluster]:
    """A cluster for as long as the block runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        cluster = SmallCluster()
        try:
            yield cluster
        finally:
            cluster.close()
