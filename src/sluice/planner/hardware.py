"""Accelerators as the planner sees them: memory, bandwidth, dense peaks, link, dated prices."""

from dataclasses import dataclass

# Where a device has no unit for a format, the next wider one computes it.
_WIDER = {"fp4": "fp8", "mxfp8": "bf16", "int8": "fp8", "fp8": "bf16"}


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device. ``memory_gib`` is what the driver shows, not what the box says.

    Peaks are dense, in TFLOP/s. ``link_gb_s`` counts both directions of one device. Prices are
    inputs with a date: what is asked for differs by an order of magnitude between sellers.
    """

    name: str
    architecture: str
    memory_gib: float
    bandwidth_gb_s: float
    bf16_tflops: float
    fp8_tflops: float | None = None
    fp4_tflops: float | None = None
    link: str = "pcie"
    link_gb_s: float = 64.0
    power_w: float | None = None
    usd_per_hour_low: float | None = None
    usd_per_hour_high: float | None = None
    price_date: str | None = None
    vendor: str = "unknown"
    verified: str = "no"
    price_source: str | None = None

    @property
    def memory_bytes(self) -> float:
        """Memory that the driver shows."""
        return self.memory_gib * 2**30

    @property
    def bandwidth_bytes_s(self) -> float:
        """Memory bandwidth."""
        return self.bandwidth_gb_s * 1e9

    @property
    def link_bytes_s(self) -> float:
        """Bandwidth of the link in one direction."""
        return self.link_gb_s * 1e9 / 2

    def peak_flops_s(self, activations: str) -> float:
        """Dense peak for values of this format, or of the next wider one that there is."""
        peaks = {"fp4": self.fp4_tflops, "fp8": self.fp8_tflops, "int8": self.fp8_tflops}
        if self.fp4_tflops is not None:
            # Scales per block came with the units for four bits.
            peaks["mxfp8"] = self.fp8_tflops
        kind = activations
        while peaks.get(kind) is None and kind in _WIDER:
            kind = _WIDER[kind]
        found = peaks.get(kind)
        return (self.bf16_tflops if found is None else found) * 1e12
