"""What API processes and the engine say to each other: msgpack over ZeroMQ (DEALER to ROUTER), in a 0700 directory.

Each output message to a client carries a sequence number; the client acknowledges it. A client that finds a gap has
lost tokens and fails its open requests; one that leaves too many unacknowledged is no longer scheduled until it
catches up. A client is known to live by the lock it holds on `<client_id>.lock` in the same directory.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.engine.adapters import LoadedAdapter
from octavo.engine.types import Request, TokenEvent


class Hello(msgspec.Struct, tag="hello"):
    """First message of a client; answered by `Ready` or `Failed`."""


class AddRequest(msgspec.Struct, tag="add"):
    request: Request


class Abort(msgspec.Struct, tag="abort"):
    """Ends choices of a request (all when `choices` is None); each still gets its terminal event."""

    request_id: str
    choices: list[int] | None = None


class Ack(msgspec.Struct, tag="ack"):
    """All output messages up to `sequence` have been taken in."""

    sequence: int


class Ping(msgspec.Struct, tag="ping"):
    """Asks the loop itself, not a side thread, for `Outputs` with fresh stats: an answer means that it is stepping."""


class LoadAdapter(msgspec.Struct, tag="load_adapter"):
    """Answered by `AdapterNews` with the same `call`."""

    call: int
    name: str
    path: str
    in_place: bool = False


class UnloadAdapter(msgspec.Struct, tag="unload_adapter"):
    """Answered as `LoadAdapter` is."""

    call: int
    name: str


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Stop after running requests end (`drain`) or at once, aborting them."""

    drain: bool


ToEngine = Hello | AddRequest | Abort | Ack | Ping | LoadAdapter | UnloadAdapter | Shutdown


class EngineFacts(msgspec.Struct):
    """What the engine found out while starting."""

    pid: int
    device: str
    dtype: str
    kernels: str
    """the instruction set the kernels chose, or "reference" """
    num_blocks: int
    block_size: int
    max_model_len: int
    weights_bytes: int
    kv_cache_bytes: int
    load_seconds: float
    kv_cache_dtype: str = ""
    """what the KV cache keeps: `dtype`, or a name of `backends.kv.KV_FORMATS`"""
    prefix_caching: bool = False
    asynchronous: bool = False
    """the device works by itself while the host plans: the overlapped loop pays"""
    num_speculative_tokens: int = 0
    """most tokens guessed at a time; 0 without speculative decoding"""
    fingerprint: str = ""
    """of everything that the numbers depend on: weights, precision, kernels, instruction set, page size"""


class OffloadCounts(msgspec.Struct, omit_defaults=True):
    """What went between the device and host memory (store, load) and between that and the disk (write, read)."""

    store_bytes: int = 0
    store_s: float = 0.0
    load_bytes: int = 0
    load_s: float = 0.0
    stores_skipped: int = 0
    """blocks given up without a copy, since every slot was held"""
    disk_write_bytes: int = 0
    disk_write_s: float = 0.0
    disk_writes_dropped: int = 0
    """blocks not written, since too many were waiting to be"""
    disk_read_bytes: int = 0
    disk_read_s: float = 0.0
    disk_read_failures: int = 0
    """blocks that were gone, damaged or unreadable when they were wanted"""


class Stats(msgspec.Struct, omit_defaults=True):
    """Counters since start and gauges of now; `/metrics` is made from them."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    preemptions: int = 0
    preemptions_swapped: int = 0
    """of the preemptions, those whose blocks went to the host"""
    prefix_queries: int = 0
    """tokens looked up in the prefix cache"""
    prefix_hits: int = 0
    """tokens found there, in whatever tier"""
    cached_by_source: dict[str, int] = {}
    """prompt tokens that were not computed, by where they lay: device, host, disk"""
    host_blocks_used: int = 0
    host_blocks_total: int = 0
    disk_bytes_used: int = 0
    offload: OffloadCounts | None = None
    """None without a host tier"""
    rejected: dict[str, int] = {}
    """requests refused at admission, by the limit that refused them"""
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[int] = []
    prompt_tokens: int = 0
    generation_tokens: int = 0
    step_tokens: int = 0
    """computed by all steps together"""
    adapters_running: list[str] = []
    adapters_waiting: list[str] = []
    """names of the adapters that running and waiting sequences use"""
    steps_by_tokens: list[int] = []
    """steps of up to 1, 8, 16, … tokens (`wire.metric_names.ITERATION_BUCKETS`) and of more than the last, each step
    counted once"""


class Progress(msgspec.Struct, tag="progress"):
    """While starting: `done` of `total` bytes of weights loaded."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, tag="ready"):
    facts: EngineFacts
    adapters: list[LoadedAdapter] = []


class Failed(msgspec.Struct, tag="failed"):
    """The engine cannot start, or cannot go on; it exits after this."""

    error: dict[str, Any]


class Outputs(msgspec.Struct, tag="outputs"):
    sequence: int
    """1, 2, 3, … for each client"""
    events: list[TokenEvent]
    stats: Stats
    timings: dict[str, list[float]] = {}
    """request id to [queued, first scheduled] seconds since the epoch, with a request's first event"""


class AdapterNews(msgspec.Struct, tag="adapters"):
    """The adapters that are loaded now: to every client when they change, and as the answer to a `call`."""

    loaded: list[LoadedAdapter]
    call: int | None = None
    error: dict[str, Any] | None = None
    """why the call changed nothing"""


FromEngine = Progress | Ready | Failed | Outputs | AdapterNews

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
