"""KEDA's external scaler: answers how many replicas a model should have, over gRPC.

The number is the gateway's own, read from its metrics; nothing is decided here. While it cannot be
read every call fails with UNAVAILABLE, so that KEDA keeps what there is or takes the fallback of
its ScaledObject: an outage must not look like a model that nobody asks for. The contract is
``externalscaler.proto`` of KEDA, whose messages are described below by name and number.
"""

import asyncio
import http.client
import logging
import math
import re
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_log = logging.getLogger(__name__)

SERVICE = "externalscaler.ExternalScaler"
METRIC = "sluice_replicas_wanted"
# Name of the metric towards KEDA; HPAs show it.
METRIC_NAME = "sluice-replicas-wanted"
# One replica for each that is desired: the average per replica is 1 when they are as many.
_TARGET = 1
_PUSH_S = 1.0
_FETCH_S_MAX = 2.0
_PAGE_BYTES_MAX = 8 << 20
_WANTED_MAX = 1_000_000

_F = descriptor_pb2.FieldDescriptorProto
_TEXT, _FLAG, _WHOLE, _REAL = _F.TYPE_STRING, _F.TYPE_BOOL, _F.TYPE_INT64, _F.TYPE_DOUBLE
# Messages with their fields: name, number, and a type or the message that it repeats or holds.
_MESSAGES: Mapping[str, tuple[tuple[str, int, Any], ...]] = {
    "ScaledObjectRef": (("name", 1, _TEXT), ("namespace", 2, _TEXT), ("scalerMetadata", 3, dict)),
    "IsActiveResponse": (("result", 1, _FLAG),),
    "MetricSpec": (
        ("metricName", 1, _TEXT), ("targetSize", 2, _WHOLE), ("targetSizeFloat", 3, _REAL),
    ),
    "GetMetricSpecResponse": (("metricSpecs", 1, ["MetricSpec"]),),
    "GetMetricsRequest": (("scaledObjectRef", 1, "ScaledObjectRef"), ("metricName", 2, _TEXT)),
    "MetricValue": (
        ("metricName", 1, _TEXT), ("metricValue", 2, _WHOLE), ("metricValueFloat", 3, _REAL),
    ),
    "GetMetricsResponse": (("metricValues", 1, ["MetricValue"]),),
}  # fmt: skip

# The wanted number of replicas by model; raises ``DesiredUnknown``.
Desired = Callable[[], Awaitable[Mapping[str, float]]]


class DesiredUnknown(Exception):
    """The gateway does not say how many replicas it wants."""


def read_desired(page: str) -> Mapping[str, float]:
    """The wanted numbers in a page of metrics, by model. Raises ``DesiredUnknown`` without any."""
    # A line that has no end was cut, perhaps in the middle of its number.
    line = rf'^{METRIC}{{[^}}\n]*model="([^"\n]+)"[^}}\n]*}}[ \t]+([^\s]+)[^\n]*\n'
    found = re.findall(line, page, re.MULTILINE)
    if not found:
        raise DesiredUnknown(
            f"the page has no {METRIC}: is it a gateway of sluice, and has a model replicas.max?"
        )
    return {model: _count(value) for model, value in found}


def _count(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _WANTED_MAX:
        raise DesiredUnknown(f"the page has a {METRIC} of {text[:40]}, which is no number of them")
    return value


def desired_of(url: str, key: str | None) -> Desired:
    """Reads the metrics of the gateway at ``url``, with its API key where it asks for one."""
    page = f"{url.rstrip('/')}/metrics"

    def fetch() -> str:
        request = urllib.request.Request(page)  # noqa: S310 - the operator's own
        if key is not None:  # for the gateway alone, wherever it points to
            request.add_unredirected_header("authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=_FETCH_S_MAX) as reply:  # noqa: S310 - as above
                return str(reply.read(_PAGE_BYTES_MAX).decode(errors="replace"))
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise DesiredUnknown(f"{page} does not answer: {error}") from error

    async def desired() -> Mapping[str, float]:
        return read_desired(await asyncio.to_thread(fetch))

    return desired


def _file() -> descriptor_pb2.FileDescriptorProto:
    """The contract's messages, described."""
    file = descriptor_pb2.FileDescriptorProto(
        name="externalscaler.proto", package="externalscaler", syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, number, kind in fields:
            field = message.field.add(name=field_name, number=number, label=_F.LABEL_OPTIONAL)
            match kind:
                case list() | str():
                    (held,) = kind if isinstance(kind, list) else (kind,)
                    field.type, field.type_name = _F.TYPE_MESSAGE, f".externalscaler.{held}"
                    if isinstance(kind, list):
                        field.label = _F.LABEL_REPEATED
                case type():
                    _map_of_text(message, field)
                case _:
                    field.type = kind
    return file


def _map_of_text(message: Any, field: Any) -> None:
    """Make a field a map of text to text, which protobuf spells as a message of its own."""
    entry = message.nested_type.add(name=f"{field.name[0].upper()}{field.name[1:]}Entry")
    entry.options.map_entry = True
    for number, name in enumerate(("key", "value"), 1):
        entry.field.add(name=name, number=number, type=_TEXT, label=_F.LABEL_OPTIONAL)
    field.type, field.label = _F.TYPE_MESSAGE, _F.LABEL_REPEATED
    field.type_name = f".externalscaler.{message.name}.{entry.name}"


def messages() -> Mapping[str, Any]:
    """The classes of the contract's messages, by name."""
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_file())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"externalscaler.{name}"))
        for name in _MESSAGES
    }


class KedaScaler:
    """The four calls of the contract. ``desired`` reads what the gateway wants."""

    def __init__(self, desired: Desired) -> None:
        self._desired = desired
        self._messages = messages()

    async def serve(self, address: str) -> tuple[Any, int]:
        """Answer at ``HOST:PORT``; returns the server, which can be stopped, and its port.

        Raises ``RuntimeError`` where the address cannot be listened at.
        """
        server = grpc.aio.server()
        kinds = self._messages
        unary = grpc.unary_unary_rpc_method_handler
        ref = kinds["ScaledObjectRef"].FromString
        methods = {
            "IsActive": unary(self._is_active, ref, _bytes_of),
            "StreamIsActive": grpc.unary_stream_rpc_method_handler(
                self._stream_is_active, ref, _bytes_of
            ),
            "GetMetricSpec": unary(self._metric_spec, ref, _bytes_of),
            "GetMetrics": unary(self._metrics, kinds["GetMetricsRequest"].FromString, _bytes_of),
        }
        served = grpc.method_handlers_generic_handler(SERVICE, methods)
        server.add_generic_rpc_handlers((served,))
        port = server.add_insecure_port(address)
        await server.start()
        return server, port

    async def _is_active(self, ref: Any, context: Any) -> Any:
        return self._messages["IsActiveResponse"](result=await self._wanted(ref, context) > 0)

    async def _stream_is_active(self, ref: Any, context: Any) -> AsyncIterator[Any]:
        """Say at once and at every change whether the model is to have any replica."""
        told: bool | None = None
        while True:
            is_active = await self._wanted(ref, context) > 0
            if is_active is not told:
                told = is_active
                yield self._messages["IsActiveResponse"](result=is_active)
            await asyncio.sleep(_PUSH_S)

    async def _metric_spec(self, ref: Any, context: Any) -> Any:
        await self._model_of(ref, context)
        spec = self._messages["MetricSpec"](
            metricName=METRIC_NAME, targetSize=_TARGET, targetSizeFloat=_TARGET
        )
        return self._messages["GetMetricSpecResponse"](metricSpecs=[spec])

    async def _metrics(self, request: Any, context: Any) -> Any:
        wanted = await self._wanted(request.scaledObjectRef, context)
        value = self._messages["MetricValue"](
            metricName=request.metricName or METRIC_NAME,
            metricValue=math.ceil(wanted),
            metricValueFloat=wanted,
        )
        return self._messages["GetMetricsResponse"](metricValues=[value])

    async def _model_of(self, ref: Any, context: Any) -> str:
        model = ref.scalerMetadata.get("model", "")
        if not model:
            words = 'the trigger of the ScaledObject names no model: add metadata "model"'
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, words)
        return str(model)

    async def _wanted(self, ref: Any, context: Any) -> float:
        """How many replicas the model of a ScaledObject is to have; ends the call otherwise."""
        model = await self._model_of(ref, context)
        try:
            desired = await self._desired()
        except DesiredUnknown as unknown:
            _log.warning("not known how many replicas %s is to have: %s", model, unknown)
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(unknown))
            raise
        if model not in desired:
            known = ", ".join(sorted(desired))
            words = f"the gateway has no model {model!r} that it scales; it has: {known}"
            await context.abort(grpc.StatusCode.NOT_FOUND, words)
        return desired[model]


def _bytes_of(message: Any) -> bytes:
    return bytes(message.SerializeToString())
