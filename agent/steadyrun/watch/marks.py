"""The marks a rank makes on its slot of the board: sections, steps, beats and calls of ``should_stop``.

The fast path is the product. An empty section is about a microsecond and no system call: the closures below hold what
they need as constants and counters, entries go to preallocated lists, and what others read is written by plain stores
into the mapped page. Nothing here takes a lock that another process could hold, waits, or raises, whatever the agent
does.

What is defined besides a plain ``with section("x")`` in the main thread:

- *recursion and nesting*: each entry is one open section; the board shows the ``LANE_DEPTH`` outermost of a thread,
  deeper ones are counted in ``S_DROPPED`` and their durations still recorded.
- *out of order*: an exit removes the newest entry of the same section wherever it is in the thread's stack, as when a
  generator that is suspended inside a section is resumed. An exit without an entry does nothing.
- *threads*: a thread other than the main one takes one of the lanes 1 to ``LANES - 1`` while it has sections open; when
  all are taken its sections are counted in ``S_DROPPED`` and only their durations recorded. A thread that ends takes
  its open sections with it. A section entered in the main thread and left in another is closed at the next step;
  entered in any other thread and left elsewhere, it stays open until that thread ends.
- *names*: cut to ``NAME_BYTES`` of UTF-8; from the 64th on they share the entry ``(other)``.
- *exceptions* pass through. One that a signal handler raises in the instant between the end of the block and the exit
  leaves the section open.
- *fork*: in the child every call does nothing.
"""

from __future__ import annotations

import sys
from _thread import _local, allocate_lock, get_ident, get_native_id
from time import monotonic, monotonic_ns

from steadyrun.core.layout import (
    F_EXPLICIT_STEPS,
    F_STEP_IS_GLOBAL,
    F_USES_SHOULD_STOP,
    H_STOP_AT_CALL,
    LANE_DEPTH,
    LANE_WORDS,
    LANES,
    NAME_BYTES,
    NAMES,
    OTHER,
    RING,
    RING_SHIFT,
    S_ATTACHED,
    S_ATTEMPT,
    S_BEAT_AT,
    S_BEATS,
    S_CKPT_DONE,
    S_DROPPED,
    S_FINISHED,
    S_FIRST_STEP_AT,
    S_FLAGS,
    S_LANES,
    S_NAME_COUNTS,
    S_NAME_TABLE,
    S_NAMES,
    S_OWNER_PID,
    S_RANK,
    S_RING,
    S_RING_COUNT,
    S_STEP,
    S_STEP_AT,
    S_STEP_RING,
    S_STEP_RING_COUNT,
    S_STEPS_DONE,
    S_STOP_CALLS,
    SHORTEST_NS,
    SLOT_WORDS,
    STEP_RING,
    TAG_S,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    class SectionLike(Protocol):
        """What ``section`` returns: a context manager that can be entered again, and a decorator."""

        def __enter__(self) -> Any: ...
        def __exit__(self, kind: object, value: object, trace: object) -> None: ...
        def __call__(self, function: Any) -> Any: ...


__all__ = ["Marks", "make_marks"]

NEVER_NS = 1 << 62
EVALUATIONS = frozenset(("evaluation", "eval", "evaluate", "validation", "validate", "test"))
_CACHED_NAMES = 1024  # a script that makes up names without end must not grow without end
_CO_GENERATOR, _CO_COROUTINE, _CO_ASYNC_GENERATOR = 0x20, 0x80, 0x200


class Marks:
    """The functions that mark, all of one slot.

    Attributes:
        section, step, beat, should_stop, is_active: the public functions of ``steadyrun.watch``.
        step_seen: ``step`` for the optimizer hook; does nothing once the script calls ``step`` itself. Takes the number
            of the step, or None for the next one.
        resume_at: the number of the first step that will be seen, in the life of the model; before any was.
        has_explicit_steps: the script calls ``step`` itself.
        last_step: number of the newest step, or None.
        finish: the script has ended: closes ``setup``, opens ``teardown``. Once; later calls do nothing.
        set_flag: sets one of the ``F_`` bits.
        open_sections: (lane, name, seconds open) of all threads, outermost first.
        forked: the child's side of a fork: from now on nothing is written.
        observe: what to call after the first, the third and each step was marked (``timed``, then ``each_step``: both
            get its number), at a step or beat not before a time (gets the time, returns the next one), and when a
            section that is no step's work is entered (gets its name) and left. Those not given stay as they are.
        now_ns: the board's time.
    """

    __slots__ = (
        "beat",
        "finish",
        "forked",
        "has_explicit_steps",
        "is_active",
        "last_step",
        "now_ns",
        "observe",
        "open_sections",
        "resume_at",
        "section",
        "set_flag",
        "should_stop",
        "step",
        "step_seen",
    )

    section: Callable[[str], SectionLike]
    step: Callable[[int], None]
    beat: Callable[[], None]
    should_stop: Callable[[], bool]
    is_active: Callable[[], bool]
    step_seen: Callable[[int | None], None]
    resume_at: Callable[[int], None]
    has_explicit_steps: Callable[[], bool]
    last_step: Callable[[], int | None]
    finish: Callable[[], None]
    set_flag: Callable[[int], None]
    open_sections: Callable[[], list[tuple[int, str, float]]]
    forked: Callable[[], None]
    observe: Callable[..., None]
    now_ns: Callable[[], int]


def decorate(section: SectionLike, function: Any) -> Any:
    """*function* inside the section: each call, each run of a coroutine, or a generator from first to last item."""
    from functools import wraps

    kind = getattr(getattr(function, "__code__", None), "co_flags", 0)
    if kind & _CO_COROUTINE:

        @wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with section:
                return await function(*args, **kwargs)

        return awaited
    if kind & _CO_GENERATOR:

        @wraps(function)
        def generated(*args: Any, **kwargs: Any) -> Any:
            with section:
                return (yield from function(*args, **kwargs))

        return generated
    if kind & _CO_ASYNC_GENERATOR:

        @wraps(function)
        async def iterated(*args: Any, **kwargs: Any) -> Any:
            with section:
                async for item in function(*args, **kwargs):
                    yield item

        return iterated

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with section:
            return function(*args, **kwargs)

    return called


def name_bytes(name: str) -> bytes:
    """The name as the table holds it: UTF-8, cut between characters, padded with zeros."""
    raw = name.encode("utf-8", "replace")
    if len(raw) > NAME_BYTES:
        raw = raw[:NAME_BYTES].decode("utf-8", "ignore").encode()
    return raw.ljust(NAME_BYTES, b"\0")


def make_marks(words: memoryview, base: int, base_ns: int, pid: int, rank: int, attempt: int) -> Marks:
    """Claim the slot at *base* for this process and open ``setup``. Call it in the main thread, once per process.

    Args:
        words: the board as writable unsigned 64-bit words. What the slot held before is wiped.
        base: index of the slot's first word.
        base_ns: the board's time base.
    """
    doubles = words.cast("B").cast("d")
    base_s = base_ns / 1e9
    entries_at = base + S_LANES + 1
    ring_at = base + S_RING
    ring_count_at = base + S_RING_COUNT
    dropped_at = base + S_DROPPED
    step_ring_at = base + S_STEP_RING
    beats_at, beat_time_at = base + S_BEATS, base + S_BEAT_AT
    ring_mask, step_ring_mask = RING - 1, STEP_RING - 1
    shortest_s = SHORTEST_NS / 1e9

    main = get_ident()
    is_forked = False
    depth = 0  # of the main lane; LANE_DEPTH + 1 while deeper sections are open, which are in `deep`
    owners: list[Section | None] = [None] * (LANE_DEPTH + 1)  # the last stays None: no section is ever left by it
    since: list[float] = [0.0] * (LANE_DEPTH + 1)
    deep: list[tuple[Section, float]] = []
    strays: list[Section] = []  # left in another thread, to be closed by the main one
    ring_count = 0
    flags = 0

    class Section:
        """A named stretch of work: a context manager that can be entered again and nested, and a decorator.

        Each name is a class of its own, made by ``new_section``, whose enter and exit are functions without ``self``:
        the ``with`` statement then makes no bound methods, which saves a seventh of the whole (measured).
        """

        __slots__ = ("is_new", "is_threaded", "name", "name_id", "opened", "ring_tag")

        def __init__(self, name: str, name_id: int) -> None:
            self.name = name
            self.name_id = name_id
            self.opened = (name_id + 1) * TAG_S - base_s  # plus the time: the entry of an open section
            self.ring_tag = name_id << RING_SHIFT
            self.is_new = True  # not completed yet
            self.is_threaded = False  # has been entered in a thread other than the main one

        def __enter__(self) -> None:
            raise AssertionError("new_section gives each name its own")

        def __exit__(self, kind: object, value: object, trace: object) -> None:
            raise AssertionError("new_section gives each name its own")

        def __call__(self, function: Any) -> Any:
            return decorate(self, function)

        def __reduce__(self) -> Any:
            return section, (self.name,)  # in a spawned data-loader worker it becomes the section that does nothing

        def __repr__(self) -> str:
            return f"<section {self.name}>"

    def new_section(name: str, name_id: int) -> Section:
        opened = (name_id + 1) * TAG_S - base_s

        # ExitStack calls the functions of the class with the section in front: hence the arguments that nobody reads.
        def enter(_: object = None) -> None:
            nonlocal depth
            if get_ident() != main:
                enter_elsewhere(mine)
                return
            now = monotonic()
            # No call below: in CPython from 3.11 on no signal handler and no other thread runs before the return.
            at = depth
            if at >= LANE_DEPTH:
                enter_deep(mine, now)
                return
            depth = at + 1
            owners[at] = mine
            since[at] = now
            doubles[entries_at + at] = now + opened

        def exit_(_: object = None, kind: object = None, value: object = None, trace: object = None) -> None:
            nonlocal depth
            if mine.is_threaded and get_ident() != main:
                exit_elsewhere(mine)
                return
            now = monotonic()
            at = depth - 1
            if owners[at] is not mine:
                exit_out_of_order(mine, now)
                return
            depth = at
            doubles[entries_at + at] = now - base_s
            if now - since[at] >= shortest_s or mine.is_new:
                record(mine, now - since[at])

        body = {"__slots__": (), "__enter__": staticmethod(enter), "__exit__": staticmethod(exit_)}
        mine: Section = type("Section", (Section,), body)(name, name_id)
        return mine

    def counting_saves(made: Section) -> Section:
        """``checkpointing``: its completions are counted apart."""
        leave = type(made).__exit__

        def exit_(*_: object) -> None:
            leave()  # type: ignore[call-arg]
            if not is_forked:
                words[base + S_CKPT_DONE] += 1

        type(made).__exit__ = staticmethod(exit_)  # type: ignore[method-assign]
        return made

    def timed_apart(made: Section) -> Section:
        """``checkpointing`` and evaluation: their time is no step's own work."""
        enter, leave = type(made).__enter__, type(made).__exit__

        def enter_(_: object = None) -> None:
            enter()  # type: ignore[call-arg]
            if on_aside is not None:
                on_aside(made.name)

        def exit_(*_: object) -> None:
            if on_aside_end is not None:
                on_aside_end()
            leave()  # type: ignore[call-arg]

        type(made).__enter__ = staticmethod(enter_)  # type: ignore[method-assign]
        type(made).__exit__ = staticmethod(exit_)  # type: ignore[method-assign]
        return made

    def ending_setup(made: Section) -> Section:
        """``setup`` or ``step`` as opened by the script: its first entry ends the implicit ``setup``."""
        enter = type(made).__enter__

        def first(_: object = None) -> None:
            type(made).__enter__ = staticmethod(enter)  # type: ignore[method-assign]
            close_setup()
            enter()  # type: ignore[call-arg]

        type(made).__enter__ = staticmethod(first)  # type: ignore[method-assign]
        return made

    def record(done: Section, duration_s: float) -> None:
        nonlocal ring_count
        if done.is_new:
            done.is_new = False
            words[base + S_NAME_COUNTS + done.name_id] = 1
        if duration_s >= shortest_s:
            words[ring_at + (ring_count & ring_mask)] = int(duration_s * 1e9) + done.ring_tag
            ring_count += 1
            words[ring_count_at] = ring_count

    # -- main lane, less common ways -----------------------------------------------------------------------------------
    def enter_deep(entered: Section, now: float) -> None:
        nonlocal depth
        depth = LANE_DEPTH + 1
        deep.append((entered, now))
        words[dropped_at] += 1

    def exit_out_of_order(left: Section, now: float) -> None:
        """Remove the newest entry of *left*, if there is one."""
        nonlocal depth
        if is_forked:
            return
        if get_ident() != main:  # left in a thread that never entered it
            exit_elsewhere(left)
            return
        for place in range(len(deep) - 1, -1, -1):
            if deep[place][0] is left:
                record(left, now - deep.pop(place)[1])
                if not deep:
                    depth = LANE_DEPTH
                return
        shown = min(depth, LANE_DEPTH)
        for place in range(shown - 1, -1, -1):
            if owners[place] is left:
                break
        else:
            return
        duration = now - since[place]
        for at in range(place, shown - 1):
            owners[at], since[at] = owners[at + 1], since[at + 1]
            doubles[entries_at + at] = doubles[entries_at + at + 1]
        last = shown - 1
        if deep:  # the outermost of those too deep to be shown moves up
            owner, entered_at = deep.pop(0)
            owners[last], since[last] = owner, entered_at
            doubles[entries_at + last] = entered_at + owner.opened
            depth = LANE_DEPTH + 1 if deep else LANE_DEPTH
        else:
            doubles[entries_at + last] = now - base_s
            depth = last
        record(left, duration)

    def close_strays() -> None:
        while strays:
            exit_out_of_order(strays.pop(), monotonic())

    # -- other threads -------------------------------------------------------------------------------------------------
    free_lanes = list(range(LANES - 1, 0, -1))

    class ThreadLane:
        """The open sections of one thread other than the main one, shown in a lane while there is one."""

        __slots__ = ("lane", "native_id", "open")

        def __init__(self) -> None:
            self.lane = 0  # 0: none
            self.native_id = get_native_id()
            self.open: list[tuple[Section, float]] = []

        def show(self, now: float) -> None:
            """Write the entries anew; *now* where there is none any more."""
            at = base + S_LANES + self.lane * LANE_WORDS
            words[at] = self.native_id
            shown = [entered_at + owner.opened for owner, entered_at in self.open[:LANE_DEPTH]]
            for place in range(LANE_DEPTH):
                if place < len(shown):
                    doubles[at + 1 + place] = shown[place]
                elif doubles[at + 1 + place] >= TAG_S:
                    doubles[at + 1 + place] = now - base_s

        def enter(self, entered: Section, now: float) -> None:
            if not self.lane and not self.open:
                try:
                    self.lane = free_lanes.pop()  # one atomic operation, no lock
                except IndexError:
                    self.lane = 0
            self.open.append((entered, now))
            if not self.lane or len(self.open) > LANE_DEPTH:
                words[dropped_at] += 1
            else:
                self.show(now)

        def exit(self, left: Section, now: float) -> bool:
            for place in range(len(self.open) - 1, -1, -1):
                if self.open[place][0] is left:
                    record(left, now - self.open.pop(place)[1])
                    if self.lane:
                        self.show(now)
                        if not self.open:
                            self.give_lane_back()
                    return True
            return False

        def give_lane_back(self) -> None:
            lane, self.lane = self.lane, 0
            free_lanes.append(lane)

        def __del__(self) -> None:  # the thread has ended
            if self.lane and not is_forked:
                self.open.clear()
                self.show(monotonic())
                self.give_lane_back()

    local = _local()

    def enter_elsewhere(entered: Section) -> None:
        if is_forked:
            return
        entered.is_threaded = True
        mine = getattr(local, "lane", None)
        if mine is None:
            mine = local.lane = ThreadLane()
        mine.enter(entered, monotonic())

    def exit_elsewhere(left: Section) -> None:
        if is_forked:
            return
        mine = getattr(local, "lane", None)
        if (mine is None or not mine.exit(left, monotonic())) and len(strays) < 64:
            strays.append(left)

    # -- names ---------------------------------------------------------------------------------------------------------
    sections: dict[str, Section] = {}
    ids: dict[bytes, int] = {name_bytes(OTHER): 0}
    new_name = allocate_lock()

    def id_of(name: str) -> int:
        text = name_bytes(name)
        known = ids.get(text)
        if known is not None:
            return known
        new_id = len(ids)
        if new_id >= NAMES:
            return 0
        at = base + S_NAME_TABLE + new_id * NAME_BYTES // 8
        for place in range(NAME_BYTES // 8):
            words[at + place] = int.from_bytes(text[8 * place : 8 * place + 8], sys.byteorder)
        ids[text] = new_id
        words[base + S_NAMES] = new_id + 1
        return new_id

    def make_section(name: str) -> Section:
        if is_forked or len(sections) >= _CACHED_NAMES:
            return other
        if not isinstance(name, str):
            return make_section(str(name))
        with new_name:
            made = sections.get(name)
            if made is None:
                name_id = id_of(name)
                if name_id == 0:
                    made = other
                else:
                    made = new_section(name, name_id)
                    if name == "checkpointing":
                        made = timed_apart(counting_saves(made))
                    elif name in EVALUATIONS:
                        made = timed_apart(made)
                    elif name in ("setup", "step"):
                        made = ending_setup(made)
                sections[name] = made
            return made

    def section(name: str) -> Section:
        try:
            return sections[name]
        except (KeyError, TypeError):
            return make_section(name)

    # -- the implicit section -----------------------------------------------------------------------------------------
    setup: Section | None = None  # not the one the script gets, so that the two can be told apart

    def close_setup() -> None:
        nonlocal setup
        if setup is not None and not is_forked:
            mine, setup = setup, None
            if get_ident() == main:
                exit_out_of_order(mine, monotonic())
            else:
                strays.append(mine)

    # -- steps, beats, stop --------------------------------------------------------------------------------------------
    beats = 0
    stop_calls = 0
    steps_done = 0
    last_step = -1
    last_step_ns = 0
    is_explicit = False
    is_numbered = False
    is_finished = False
    rearm_at_ns = NEVER_NS
    on_late: Callable[[int], int] | None = None
    on_first_step: Callable[[], None] | None = None
    on_third_step: Callable[[], None] | None = None
    on_timed: Callable[[int], None] | None = None
    on_step: Callable[[int], None] | None = None
    on_aside: Callable[[str], None] | None = None
    on_aside_end: Callable[[], None] | None = None

    def mark_step(step: int) -> None:
        nonlocal steps_done, last_step, last_step_ns, rearm_at_ns
        now = monotonic_ns() - base_ns
        if steps_done:
            words[step_ring_at + (steps_done - 1 & step_ring_mask)] = now - last_step_ns
            words[base + S_STEP_RING_COUNT] = steps_done
        steps_done += 1
        last_step = step
        last_step_ns = now
        words[base + S_STEP] = step + 1
        words[base + S_STEP_AT] = now
        words[base + S_STEPS_DONE] = steps_done
        if strays:
            close_strays()
        if now >= rearm_at_ns and on_late is not None:
            rearm_at_ns = on_late(now)
        if steps_done <= 3:
            mark_early_step(now)
        if on_timed is not None:
            on_timed(step)
        if on_step is not None:
            on_step(step)

    def mark_early_step(now: int) -> None:
        nonlocal on_first_step
        if steps_done == 1:
            words[base + S_FIRST_STEP_AT] = now
            close_setup()
            if on_first_step is not None:
                call, on_first_step = on_first_step, None
                call()
        elif steps_done == 3 and on_third_step is not None:
            on_third_step()

    def step(i: int) -> None:
        nonlocal is_explicit, steps_done
        if is_forked:
            return
        try:
            number = int(i)
        except (TypeError, ValueError, OverflowError):
            number = -1
        if not 0 <= number < 1 << 62:
            beat()
            return
        if not is_explicit:
            is_explicit = True
            set_flag(F_EXPLICIT_STEPS | F_STEP_IS_GLOBAL)
            if steps_done == 1:
                steps_done = 0  # the optimizer hook has already counted this very step
        mark_step(number)

    def step_seen(number: int | None) -> None:
        if is_forked:
            return
        if is_explicit:
            beat()
        else:
            mark_step(last_step + 1 if number is None or is_numbered else number)

    def resume_at(step: int) -> None:
        nonlocal is_numbered, last_step
        if is_forked or is_explicit or steps_done:
            return
        is_numbered, last_step = True, step - 1
        set_flag(F_STEP_IS_GLOBAL)

    def beat() -> None:
        nonlocal beats, rearm_at_ns
        if is_forked:
            return
        now = monotonic_ns() - base_ns
        beats += 1
        words[beats_at] = beats
        words[beat_time_at] = now
        if now >= rearm_at_ns and on_late is not None:
            rearm_at_ns = on_late(now)

    def should_stop() -> bool:
        nonlocal stop_calls
        if is_forked:
            return False
        if not stop_calls:
            set_flag(F_USES_SHOULD_STOP)
        stop_calls += 1
        words[base + S_STOP_CALLS] = stop_calls
        return 0 < words[H_STOP_AT_CALL] <= stop_calls

    def set_flag(flag: int) -> None:
        nonlocal flags
        flags |= flag
        if not is_forked:
            words[base + S_FLAGS] = flags

    # -- life ----------------------------------------------------------------------------------------------------------
    def finish() -> None:
        nonlocal is_finished
        if is_forked or is_finished:
            return
        is_finished = True
        words[base + S_FINISHED] = max(monotonic_ns() - base_ns, 1)
        close_setup()
        section("teardown").__enter__()

    def forked() -> None:
        nonlocal is_forked, main, owners
        is_forked = True
        main = 0  # no thread has it and
        owners = [None] * (LANE_DEPTH + 1)  # no section is there: both less common ways look at is_forked

    def observe(
        *,
        first_step: Callable[[], None] | None = None,
        third_step: Callable[[], None] | None = None,
        timed: Callable[[int], None] | None = None,
        each_step: Callable[[int], None] | None = None,
        aside: Callable[[str], None] | None = None,
        aside_end: Callable[[], None] | None = None,
        late: Callable[[int], int] | None = None,
        late_from_ns: int = NEVER_NS,
    ) -> None:
        nonlocal on_first_step, on_third_step, on_timed, on_step, on_aside, on_aside_end, on_late, rearm_at_ns
        on_first_step = first_step or on_first_step
        on_third_step = third_step or on_third_step
        on_timed = timed or on_timed
        on_step = each_step or on_step
        on_aside = aside or on_aside
        on_aside_end = aside_end or on_aside_end
        if late is not None:
            on_late, rearm_at_ns = late, late_from_ns

    def open_sections() -> list[tuple[int, str, float]]:
        now = monotonic() - base_s
        names = {made.name_id: made.name for made in list(sections.values())}
        names[0], names[setup_id] = OTHER, "setup"
        out = []
        for lane in range(LANES):
            at = base + S_LANES + lane * LANE_WORDS + 1
            for entry in doubles[at : at + LANE_DEPTH].tolist():
                tag, entered_at = divmod(entry, TAG_S)
                if tag < 1:
                    break
                out.append((lane, names.get(int(tag) - 1, OTHER), now - entered_at))
        return out

    words[base + S_OWNER_PID] = 0
    words[base : base + SLOT_WORDS] = memoryview(bytes(8 * SLOT_WORDS)).cast("Q")
    words[base + S_NAMES] = 1
    words[base + S_ATTEMPT] = attempt
    words[base + S_RANK] = rank
    words[base + S_LANES] = pid
    other = new_section(OTHER, 0)
    setup_id = id_of("setup")
    setup = new_section("setup", setup_id)
    setup.__enter__()
    words[base + S_ATTACHED] = max(monotonic_ns() - base_ns, 1)
    words[base + S_OWNER_PID] = pid

    marks = Marks()
    for public in (section, step, beat, should_stop):
        public.__module__ = "steadyrun.watch"
        public.__qualname__ = public.__name__
    marks.section = section
    marks.step = step
    marks.beat = beat
    marks.should_stop = should_stop
    marks.is_active = lambda: not is_forked
    marks.step_seen = step_seen
    marks.resume_at = resume_at
    marks.has_explicit_steps = lambda: is_explicit
    marks.last_step = lambda: last_step if steps_done else None
    marks.finish = finish
    marks.set_flag = set_flag
    marks.open_sections = open_sections
    marks.forked = forked
    marks.observe = observe
    marks.now_ns = lambda: monotonic_ns() - base_ns
    return marks
