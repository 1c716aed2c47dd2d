"""KEDA's calls, made by a client that is generated from the contract."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_tools import protoc

from sluice.cluster.placement.keda import METRIC_NAME, DesiredUnknown, KedaScaler, read_desired


class Generated:
    """Modules that protoc makes of the contract."""

    def __init__(self, folder: Path) -> None:
        here = Path(__file__).parent
        code = protoc.main(
            ["protoc", f"-I{here}", f"--python_out={folder}", f"--grpc_python_out={folder}",
             str(here / "externalscaler.proto")]
        )  # fmt: skip
        assert code == 0
        sys.path.insert(0, str(folder))
        try:
            import externalscaler_pb2  # type: ignore[import-not-found] # noqa: PLC0415
            import externalscaler_pb2_grpc  # type: ignore[import-not-found] # noqa: PLC0415
        finally:
            sys.path.remove(str(folder))
        self.messages: Any = externalscaler_pb2
        self.stub: Any = externalscaler_pb2_grpc.ExternalScalerStub


@pytest.fixture(scope="module")
def keda(tmp_path_factory) -> Generated:
    return Generated(tmp_path_factory.mktemp("keda"))


class Gateway:
    """Says how many replicas it wants, or does not answer."""

    def __init__(self, **wanted: float) -> None:
        self.wanted: dict[str, float] | None = dict(wanted)

    async def __call__(self) -> Mapping[str, float]:
        if self.wanted is None:
            raise DesiredUnknown("the gateway does not answer")
        return self.wanted


def scaler(gateway: Gateway, keda: Generated, work: Callable[[Any], Awaitable[None]]) -> None:
    async def main() -> None:
        server, port = await KedaScaler(gateway).serve("127.0.0.1:0")
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        try:
            async with asyncio.timeout(10), channel:
                await work(keda.stub(channel))
        finally:
            await server.stop(None)

    asyncio.run(main())


def ref(keda: Generated, **metadata: str) -> Any:
    return keda.messages.ScaledObjectRef(
        name="large", namespace="llm", scalerMetadata={"scalerAddress": "scaler:6000"} | metadata
    )


def test_an_hpa_comes_to_the_number_that_the_gateway_wants(keda):
    async def work(stub: Any) -> None:
        (spec,) = (await stub.GetMetricSpec(ref(keda, model="large"))).metricSpecs
        assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == (METRIC_NAME, 1, 1.0)
        asked = keda.messages.GetMetricsRequest(
            scaledObjectRef=ref(keda, model="large"), metricName=METRIC_NAME
        )
        (value,) = (await stub.GetMetrics(asked)).metricValues
        assert (value.metricName, value.metricValue, value.metricValueFloat) == (METRIC_NAME, 5, 5)
        assert value.metricValue / spec.targetSize == 5, "what an HPA computes of it"

    scaler(Gateway(large=5.0, small=1.0), keda, work)


@pytest.mark.parametrize(("wanted", "active"), [(0.0, False), (1.0, True)])
def test_a_model_of_which_none_is_wanted_is_not_active(keda, wanted, active):
    async def work(stub: Any) -> None:
        assert (await stub.IsActive(ref(keda, model="large"))).result is active

    scaler(Gateway(large=wanted), keda, work)


def test_a_change_from_none_to_some_is_pushed(keda, monkeypatch):
    monkeypatch.setattr("sluice.cluster.placement.keda._PUSH_S", 0.01)
    gateway = Gateway(large=0.0)

    async def work(stub: Any) -> None:
        told = stub.StreamIsActive(ref(keda, model="large"))
        assert not (await told.read()).result
        gateway.wanted = {"large": 2.0}
        assert (await told.read()).result
        told.cancel()

    scaler(gateway, keda, work)


@pytest.mark.parametrize("call", ["IsActive", "GetMetrics"])
def test_an_outage_of_the_gateway_is_no_zero(keda, call):
    """KEDA keeps what there is, or takes the fallback, only where a call fails."""
    gateway = Gateway()
    gateway.wanted = None

    async def work(stub: Any) -> None:
        asked = ref(keda, model="large")
        if call == "GetMetrics":
            asked = keda.messages.GetMetricsRequest(scaledObjectRef=asked, metricName="m")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await getattr(stub, call)(asked)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "does not answer" in (failed.value.details() or "")

    scaler(gateway, keda, work)


@pytest.mark.parametrize(
    ("metadata", "code", "words"),
    [
        ({}, grpc.StatusCode.INVALID_ARGUMENT, 'add metadata "model"'),
        ({"model": "other"}, grpc.StatusCode.NOT_FOUND, "it has: large, small"),
    ],
)
def test_a_scaled_object_that_names_no_model_of_the_gateway_is_told_so(keda, metadata, code, words):
    async def work(stub: Any) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.IsActive(ref(keda, **metadata))
        assert failed.value.code() is code
        assert words in (failed.value.details() or "")

    scaler(Gateway(large=1.0, small=1.0), keda, work)


def test_wanted_numbers_are_read_from_metrics():
    page = (
        "# TYPE sluice_replicas_wanted gauge\n"
        'sluice_replicas_wanted{model="large"} 3.0\n'
        'sluice_replicas_wanted{model="small"} 0.0\n'
        'sluice_requests_running{model="large"} 9.0\n'
    )
    assert read_desired(page) == {"large": 3.0, "small": 0.0}
    with pytest.raises(DesiredUnknown):
        read_desired("sluice_requests_running 1\n")


@pytest.mark.parametrize("value", ["nan", "+Inf", "-1", "soon", "1e300", ""])
def test_what_is_no_number_of_replicas_is_not_passed_on(value):
    page = (
        f'sluice_replicas_wanted{{model="a"}} 1.0\nsluice_replicas_wanted{{model="b"}} {value} \n'
    )
    if value:
        with pytest.raises(DesiredUnknown, match="no number"):
            read_desired(page)
    else:
        assert read_desired(page) == {"a": 1.0}


def test_a_page_that_was_cut_in_the_middle_of_a_number_tells_no_smaller_one():
    with pytest.raises(DesiredUnknown):
        read_desired('sluice_replicas_wanted{model="a"} 1')
