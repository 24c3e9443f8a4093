"""Asks one server for answers of the base model and of its adapters, a thousand at most, at once.

    .venv/bin/jlora serve --config configs/demo.toml                        # in one terminal
    .venv/bin/python examples/grpc_client.py --server 127.0.0.1:50051 "hello world"    # in another

The requests share the engine's steps; each answer is printed when it is complete. Activated LoRAs are
listed but not asked: they need their invocation tokens in the prompt.
"""

from __future__ import annotations

import argparse
import asyncio

import grpc

from jlora.serve.proto import jlora_pb2 as pb
from jlora.serve.proto import jlora_pb2_grpc as rpc


async def ask(channel: grpc.aio.Channel, model: str, text: str, max_tokens: int) -> str:
    """Streams one greedy answer of `model` and returns its text."""
    request = pb.GenerateRequest(
        model=model,
        text=text,
        sampling=pb.Sampling(temperature=0),  # greedy
        stopping=pb.Stopping(max_tokens=max_tokens),
    )
    answer, timing = "", pb.Timing()
    async for delta in rpc.InferenceStub(channel).GenerateStream(request, timeout=60):
        answer += "".join(output.text for output in delta.outputs)
        if delta.HasField("timing"):  # on the last message
            timing = delta.timing
    print(f"{model:>16}: {answer!r}  (ttft {timing.ttft_s * 1e3:.0f} ms, tpot {timing.tpot_s * 1e3:.1f} ms)")
    return answer


async def main() -> None:
    """Lists the server's models and asks all of them at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", default="hello world", help="the prompt (default: %(default)s)")
    parser.add_argument("--server", default="127.0.0.1:50051", help="HOST:PORT (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens of each answer (default: %(default)s)")
    args = parser.parse_args()

    async with grpc.aio.insecure_channel(args.server) as channel:
        info = await rpc.ControlStub(channel).GetServerInfo(pb.GetServerInfoRequest())
        listed = await rpc.AdaptersStub(channel).ListAdapters(pb.ListAdaptersRequest())  # the first thousand
        activated = [adapter.name for adapter in listed.adapters if adapter.alora_invocation_tokens]
        models = [info.model, *(adapter.name for adapter in listed.adapters if adapter.name not in activated)]
        for name in activated:
            print(f"{name:>16}: an activated LoRA, not asked: it needs its invocation in the prompt")
        await asyncio.gather(*(ask(channel, model, args.text, args.max_tokens) for model in models))


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except grpc.aio.AioRpcError as e:
        raise SystemExit(f"{e.code().name}: {e.details()}") from None
