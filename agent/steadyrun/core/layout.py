"""Where each word of the board lies. Apart from ``board`` because ranks need the numbers and nothing else: this module
imports next to nothing, while dataclasses and pathlib alone cost a starting rank 30 ms."""

import time

MAGIC = 0x7374656164793031  # "steady01"
VERSION = 4

# -- header, in words ------------------------------------------------------------------------------------------------
H_MAGIC = 0
H_VERSION = 1
H_SLOTS = 2
H_SLOT_WORDS = 3
H_BASE_NS = 4
H_AGENT_PID = 5
H_AGENT_BEAT = 6  # time word; written by the agent each pass of its loop
H_STOP_REQUESTED = 7  # 1 once a stop was asked for; should_stop() then waits for H_STOP_AT_CALL
H_STOP_AT_CALL = 8  # should_stop() returns True from this call number on (1 is the first call); 0: not set
H_CHECK_AT = 9  # number of a step + 1 after which ranks check their bytes out of turn; 0: none
HEADER_WORDS = 512

# -- slot, in words from the slot's start ------------------------------------------------------------------------------
S_OWNER_PID = 0  # 0: free
S_ATTEMPT = 1
S_RANK = 2
S_ATTACHED = 3  # time word: the in-rank side is in place
S_FINISHED = 4  # time word: the script has ended and the interpreter is being torn down
S_FLAGS = 5
S_STEP = 6  # newest step number + 1; 0: none yet
S_STEP_AT = 7  # time word of the newest step
S_STEPS_DONE = 8  # steps seen in this attempt
S_FIRST_STEP_AT = 9
S_BEATS = 10
S_BEAT_AT = 11
S_STOP_CALLS = 12  # calls of should_stop() so far
S_NAMES = 13  # entries used in the name table, entry 0 ("(other)") included
S_DROPPED = 14  # sections not recorded: no lane or no depth left
S_RING_COUNT = 15  # section durations written so far; those below SHORTEST_NS are left out
S_STEP_RING_COUNT = 16
S_CKPT_DONE = 17  # sections named "checkpointing" completed in this attempt
S_TIMING_COUNT = 18  # step timings written so far

LANES = 4  # lane 0 is the main thread; others go to threads that open sections
LANE_DEPTH = 16
LANE_WORDS = 1 + LANE_DEPTH  # native thread id, entries
# An entry is a double: (name id + 1) * TAG_S + the time of entry, seconds since the base (to a microsecond, for two
# years); once the section is closed: only the time of that. The open sections of a lane are its entries up to the first
# below TAG_S. Doubles, because CPython adds and stores them in half the time it needs for integers beyond 30 bits.
TAG_S = float(1 << 26)
SHORTEST_NS = (
    10_000  # sections shorter than this are not put into the ring: they would flood it, and nobody waits for them
)
S_LANES = 32

RING = 512  # power of two; the agent looks as often as they fill up
RING_SHIFT = 56
S_RING = S_LANES + LANES * LANE_WORDS  # entry: name id << RING_SHIFT | duration in ns
STEP_RING = 512
S_STEP_RING = S_RING + RING  # entry: step time in ns

NAMES = 64
NAME_BYTES = 48
S_NAME_TABLE = S_STEP_RING + STEP_RING
S_NAME_COUNTS = S_NAME_TABLE + NAMES * NAME_BYTES // 8  # not 0: the section was completed in this attempt
S_HASHES = S_NAME_COUNTS + NAMES  # what core.integrity.IntegrityWords shows
S_HASH_RING = S_HASHES  # descriptor of the ring in the rank, + 1; 0: none
S_HASH_GENERATION = S_HASHES + 1  # of the newest plan; 0: none
S_HASH_CHECKS = S_HASHES + 2  # checks made so far: written last
S_HASH_INTERVAL = S_HASHES + 3  # steps between checks at present; 0: no checks
S_HASH_COST = S_HASHES + 4  # ns that all checks together took of training
S_HASH_STEP = S_HASHES + 5  # ns that a step takes, on average
S_HASH_RINGS = S_HASHES + 6  # rings made so far: another one is made when more tensors come than the first can hold
S_HASH_STATE = S_HASHES + 7  # one of core.integrity.STATES
S_GUARD_COUNT = S_HASHES + 8  # losses and norms of gradients that were out of line so far: written last
S_GUARD_RING = S_HASHES + 16  # the newest of them, as core.guards has them
S_TIMING = 2048
assert S_HASHES + 256 <= S_TIMING
S_REPLAY = S_HASHES + 240  # what core.replay.ReplayWords shows
S_REPLAY_BOX = S_REPLAY  # descriptor of the rank's box for other ranks of its node, + 1; 0: none
S_REPLAY_STATE = S_REPLAY + 1  # one of core.replay.STATES
S_REPLAY_INTERVAL = S_REPLAY + 2  # steps between replays at present
S_REPLAY_COST = S_REPLAY + 3  # ns that all replays together took of training
S_REPLAY_CLEAN = S_REPLAY + 4  # replays that gave what the rank replayed had
S_REPLAY_STEP = S_REPLAY + 5  # newest step of those, + 1; 0: none
S_REPLAY_REPORTS = S_REPLAY + 6  # reports written so far: of replays that gave something else, and what follows
S_REPLAY_OF = S_REPLAY + 7  # the rank whose microbatches this one replays, + 1; 0: not known yet

TIMING_RING = 128  # power of two
TIMING_WORDS = 16
# A step timing is doubles in this order; NaN where there is none. Durations in seconds, at_s in CLOCK_MONOTONIC.
TIMING_FIELDS = (
    "step",
    "at_s",
    "wall_s",
    "busy_s",
    "forward_s",
    "backward_s",
    "optimizer_s",
    "data_s",
    "checkpoint_s",
    "wait_s",
    "cpu_s",
    "probe_s",
    "work",
    "flags",
    "starved_s",
    "group_wait_s",
)
assert len(TIMING_FIELDS) <= TIMING_WORDS
SLOT_WORDS = S_TIMING + TIMING_RING * TIMING_WORDS

OTHER = "(other)"  # name entry 0: every name beyond the table

F_STEP_IS_GLOBAL = 1  # step numbers survive a restart (given by the script, or read from the optimizer's state)
F_USES_SHOULD_STOP = 2
F_EXCEPTION = 4  # exception.json of this incarnation is written
F_EXPLICIT_STEPS = 8  # the script calls watch.step() itself


def fits(words: memoryview, size_bytes: int) -> bool:
    """Whether a mapped file is a board of this version; *words* are its unsigned 64-bit words."""
    return (
        size_bytes >= HEADER_WORDS * 8
        and words[H_MAGIC] == MAGIC
        and words[H_VERSION] == VERSION
        and words[H_SLOT_WORDS] == SLOT_WORDS
        and size_bytes == (HEADER_WORDS + words[H_SLOTS] * SLOT_WORDS) * 8
    )


def now_word(base_ns: int) -> int:
    """The time word of now; never 0."""
    return max(time.monotonic_ns() - base_ns, 1)
