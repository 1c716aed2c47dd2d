"""What sluice costs in front of engines: ``python benchmarks/gateway.py [--peers FOLDER]``.

Each gateway has one core to itself; a mock of two engines and the load share the other one. Both
are small C programs, compiled at each start (``gcc``), and the row ``direct`` is what they reach
without a gateway. Gateways take turns within a round; tables give the median of all rounds with the
least and the greatest. In sluice everything is on: keys, tenant limits, SLO class, admission,
journal, metrics. The peers (vllm-router, sglang-router, LiteLLM's proxy) run bare, with the fastest
of their routing policies: ``--install`` makes their environments below ``--peers``.

- ``one``: a request at a time: what is added to a whole answer, to the first token of a stream, and
  to a whole answer whose prompt has 400 KB. Spinners of idle priority keep the cores from halting.
- ``load``: 64 connections, closed loop.
- ``paced``: 256 streams with an event each 20 ms; events per second divided by the share of its
  core that the gateway used, and how late events come.
- ``large``: 64 connections with bodies of 400 KB, and what becomes of small requests beside them.
- ``memory``: resident memory with 1,000 streams and (sluice) over 100,000 requests.
- ``policy``: microseconds that the fleet's decisions take for the whole life of one request.

It needs two cores and about six minutes; run it alone.
"""

import sys
from pathlib import Path


def main() -> None:
    """Run the command line, with the modules beside this file."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.relay.cli import main as run  # noqa: PLC0415

    run(__doc__ or "")


if __name__ == "__main__":
    main()
