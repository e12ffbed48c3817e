"""`python -m benchmarks coalescing`: small requests that share calls, and other servers in front of the same Triton."""

from functools import partial
from pathlib import Path

from benchmarks.compare import P50, Comparison, Goal, Workload, ratio
from benchmarks.contents import SMALL, json_of
from benchmarks.load.orders import HttpAsk
from benchmarks.peers.servers import PLAIN, TRITON, plain_fastapi
from benchmarks.servers import HERE, Start, direct_client, running_gateway

MODEL = """
name: "small"
backend: "python"
max_batch_size: 64
input [ { name: "INPUT", data_type: TYPE_FP32, dims: [ 4 ] } ]
output [ { name: "OUTPUT", data_type: TYPE_FP32, dims: [ 4 ] } ]
instance_group [ { kind: KIND_CPU, count: 1 } ]
"""
CONFIG = """
pipelines:
  small: {{model: small, idempotent: true, coalesce: {coalesce}, sample: {{INPUT: [1, 2, 3, 4]}}}}
  beside: {{model: small, idempotent: true, sample: {{INPUT: [1, 2, 3, 4]}}}}
"""
EACH, SHARED, EACH_2, SHARED_2 = "a call each", "shared calls", "a call each, 2 workers", "shared calls, 2 workers"
ASKS = {name: HttpAsk(f"/v1/pipelines/{name}", json_of(INPUT=SMALL)) for name in ("small", "beside")}
SMALL_ASK = {"small": ASKS["small"]}
CALLING, SHARING = (CONFIG.format(coalesce=each) for each in ("false", "true"))
TENSOR = {"name": "INPUT", "datatype": "FP32", "shape": [1, len(SMALL)], "data": SMALL}
W_1 = Workload("1 connection", "small", times=4)
"""A goal of 3 % needs more measurements."""
BESIDE = Workload("1 connection, a call each, in the same process", "beside", times=4)
"""Another pipeline of the same gateway: the p50 of two processes differs by more than that of two pipelines."""
W_32, W_256 = Workload("32 connections", "small", 32), Workload("256 connections", "small", 256)
NOTE = (
    "A Python model with `max_batch_size: 64`, four numbers in a request; load, servers and Triton on the same cores."
)
VERSUS = f"{SHARED}, against"
GOALS = (
    Goal(
        f"p50, 1 connection: {VERSUS} a call each in the same process",
        1.03,
        None,
        ratio(W_1, SHARED, SHARED, P50, base=BESIDE),
        lower=True,
    ),
    Goal(f"requests/s, 32 connections: {VERSUS} {EACH}", 1.25, None, ratio(W_32, SHARED, EACH)),
    Goal(f"requests/s, 256 connections: {VERSUS} {EACH}", 1.3, None, ratio(W_256, SHARED, EACH)),
    Goal(f"requests/s, 256 connections: {SHARED_2}, against {EACH_2}", 1.8, None, ratio(W_256, SHARED_2, EACH_2)),
    *(
        Goal(f"requests/s, {each.title}: {own}, against {other}", None, 1, ratio(each, own, other))
        for each, own, other in (
            *((W_32, SHARED, PLAIN), (W_256, SHARED, PLAIN), (W_32, SHARED, TRITON)),
            *((W_256, SHARED, TRITON), (W_256, SHARED_2, TRITON)),
        )
    ),
)


def repository(folder: Path) -> Path:
    (folder / "small" / "1").mkdir(parents=True)
    (folder / "small" / "config.pbtxt").write_text(MODEL)
    (folder / "small" / "1" / "model.py").symlink_to(HERE / "models" / "bench_identity" / "1" / "model.py")
    return folder


PEERS: dict[str, Start] = {
    EACH: partial(running_gateway, EACH, asks=SMALL_ASK, config=CALLING),
    SHARED: partial(running_gateway, SHARED, asks=ASKS, config=SHARING),
    EACH_2: partial(running_gateway, EACH_2, asks=SMALL_ASK, config=CALLING, workers="2"),
    SHARED_2: partial(running_gateway, SHARED_2, asks=SMALL_ASK, config=SHARING, workers="2"),
    PLAIN: partial(plain_fastapi, asks={"small": HttpAsk("/small", json_of(input=SMALL))}),
    TRITON: partial(
        direct_client, TRITON, "http", asks={"small": HttpAsk("/v2/models/small/infer", json_of(inputs=[TENSOR]))}
    ),
}
COMPARISON = Comparison(
    PEERS,
    (W_1, BESIDE, W_32, W_256),
    GOALS,
    note=NOTE,
    seconds=2.0,
    first_warm_up_s=1.5,  # admission learns the model's rate
    models=repository,
    cpu_elsewhere=(TRITON,),
)
run = COMPARISON.run
