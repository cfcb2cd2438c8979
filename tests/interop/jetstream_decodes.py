"""What Google's own client of JetStream gets from a server of ours.

python tests/interop/jetstream_decodes.py PYTHON

PYTHON has this project; it serves SmolLM2 (`make models`). This script runs in
an environment of its own, with grpcio, protobuf and google-jetstream, but
without this project and JAX. Exit status 1: an answer isn't the golden one.
"""

import json
import pathlib
import subprocess
import sys
import time

import grpc
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

ROOT = pathlib.Path(__file__).parents[2]
MODEL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
GOLDEN = ROOT / "tests" / "testdata" / "smollm2" / "smollm2.json"
# Seconds to load and compile.
PATIENCE = 600
END = 2


def address(server: subprocess.Popen) -> str:
  """Where the server listens, once it says so."""
  for line in server.stderr:
    sys.stderr.write(line)
    if line.startswith("gRPC: "):
      return line.split()[1]
  sys.exit(f"error: the server ended with status {server.wait()}")


def wait_until_live(stub: jetstream_pb2_grpc.OrchestratorStub) -> None:
  limit = time.monotonic() + PATIENCE
  while not stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live:
    if time.monotonic() > limit:
      sys.exit(f"error: the server isn't live after {PATIENCE} s")
    time.sleep(0.5)


def decoded(
  stub: jetstream_pb2_grpc.OrchestratorStub, **content: object
) -> tuple[list[int], str]:
  """Read as their benchmark does: the first sample of every message."""
  request = jetstream_pb2.DecodeRequest(
    max_tokens=24, session_cache="", priority=0, **content
  )
  ids, text = [], ""
  for response in stub.Decode(request, timeout=PATIENCE):
    sample = response.stream_content.samples[0]
    ids += sample.token_ids
    text += sample.text
  return ids, text


def compare(stub: jetstream_pb2_grpc.OrchestratorStub) -> bool:
  """Whether all answers are right; says which aren't."""
  right = True
  for case in json.loads(GOLDEN.read_text())["cases"]:
    tokens = jetstream_pb2.DecodeRequest.TokenContent(
      token_ids=case["token_ids"]
    )
    expected = case["greedy_24"]
    if END in expected:
      expected = expected[: expected.index(END) + 1]
    ids, _ = decoded(stub, token_content=tokens)
    same = ids == expected
    print(f"{case['text']!r}: {'ok' if same else f'FAILED, {ids}'}", flush=True)
    right &= same
  text = jetstream_pb2.DecodeRequest.TextContent(text="The capital of France")
  ids, said = decoded(stub, text_content=text)
  answered = bool(ids) and bool(said.strip())
  print(f"text: {'ok' if answered else 'FAILED'}, {said!r}", flush=True)
  try:
    decoded(stub, token_content=jetstream_pb2.DecodeRequest.TokenContent())
    refused = False
  except grpc.RpcError as error:
    refused = error.code() is grpc.StatusCode.INVALID_ARGUMENT
  print(f"no tokens: {'ok' if refused else 'FAILED'}, refused", flush=True)
  return right and answered and refused


def main(argv: list[str]) -> None:
  if len(argv) != 2:
    sys.exit(f"error: arguments are {argv[1:]}, must be a Python")
  command = [
    *(argv[1], "-m", "launch.serve", f"--checkpoint={MODEL}", "--port=0"),
    *("--config.serving.grpc_port=0", "--config.max_length=128"),
    "--config.engine.max_concurrent_decodes=2",
  ]
  server = subprocess.Popen(
    command, cwd=ROOT, stderr=subprocess.PIPE, text=True
  )
  try:
    with grpc.insecure_channel(address(server)) as channel:
      stub = jetstream_pb2_grpc.OrchestratorStub(channel)
      wait_until_live(stub)
      right = compare(stub)
  finally:
    server.terminate()
    # A full pipe would keep it from ending.
    server.communicate()
  sys.exit(0 if right else 1)


if __name__ == "__main__":
  main(sys.argv)
