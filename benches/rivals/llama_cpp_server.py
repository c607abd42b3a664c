"""llama.cpp's server over a GGUF file, until its standard input ends. Run by `benches/serve.py`."""

import argparse
import sys

import xllamacpp

parser = argparse.ArgumentParser()
parser.add_argument("file")
parser.add_argument("--parallel", type=int, required=True)
parser.add_argument("--positions", type=int, required=True)
parser.add_argument("--threads", type=int, required=True)
arguments = parser.parse_args()

parameters = xllamacpp.CommonParams()
parameters.model.path = arguments.file
parameters.n_parallel = arguments.parallel
# For all of them together.
parameters.n_ctx = arguments.parallel * arguments.positions
parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = arguments.threads
parameters.port = 0
server = xllamacpp.Server(parameters)
print(server.listening_address.removeprefix("http://"), flush=True)
sys.stdin.read()
