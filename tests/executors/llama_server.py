"""Runs llama.cpp's own HTTP server as a child: ``python llama_server.py MODEL.gguf``.

Prints its address once it serves and ends when its standard input does, so that it cannot outlive
the test that started it.
"""

import sys

import xllamacpp

if __name__ == "__main__":
    options = xllamacpp.CommonParams()
    options.model.path = sys.argv[1]
    options.n_ctx, options.n_parallel, options.port = 2048, 1, 0
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    options.endpoint_metrics, options.warmup = True, False
    server = xllamacpp.Server(options)
    print(server.listening_address, flush=True)  # noqa: T201
    sys.stdin.read()
