# SPDX-License-Identifier: Apache-2.0
"""Splats in a guest's console: found as the file grows, whole, and named in one line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rdmalab.errors import UsageError

_LINE_LIMIT = 4096  # bytes of a line that are looked at
_SPLAT_LINES = 400
_HEAD_LINES = 12  # a "cut here" that is not followed by its reason within these is none

# "<4>", "[   12.345678]", "[  T123]" or "[    C0]" (CONFIG_PRINTK_CALLER), in this order.
_PREFIX = re.compile(r"^(?:<\d+>)?(?:\[ *\d+\.\d{3,9}\] ?)?(?:\[ *[TC]\d+\] ?)?")
_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[@-Z\\-_])")

_BOOT = "Linux version "
_CUT = "------------[ cut here ]------------"
_TASK_END = re.compile(r"^ ?</TASK>")
_TRACE_END = re.compile(r"^---\[ end trace")
_BAR = re.compile(r"^={10,}$")


@dataclass(frozen=True)
class Splat:
    """``kind`` is one of the names in ``KINDS``; ``title`` one line with no address and no
    task id in it ("WARNING at faultpoint_main.c:42 faultpoint_warn"); ``text`` the whole,
    without time stamps; ``offset`` where it starts in the console file, in bytes.
    ``complete`` says whether its end was seen."""

    node: str
    kind: str
    title: str
    text: str
    offset: int
    complete: bool


@dataclass(frozen=True)
class _Rule:
    """``start`` on a line opens a splat; ``title`` is filled with its groups. ``end`` None
    means that the line is the whole. ``places``: its name is completed from later lines."""

    kind: str
    start: re.Pattern[str]
    title: str
    end: re.Pattern[str] | None
    places: bool = False


def _rule(
    kind: str,
    start: str,
    title: str = "",
    end: re.Pattern[str] | None = None,
    *,
    places: bool = False,
) -> _Rule:
    return _Rule(kind, re.compile(start), title, end, places)


_FUNCTION = r"(?P<function>[\w.]+)\+0x[0-9a-f]+/0x[0-9a-f]+"

# Order decides: the first that matches. All are anchored at the line's start (after the
# time stamp), since what programs print on the console is nobody's splat.
_RULES = (
    # lib/bug.c until 6.17, then (with the file first) 6.18 and later.
    _rule(
        "WARNING",
        rf"^WARNING: CPU: \d+ PID: \d+ at (?P<file>\S+):(?P<line>\d+) {_FUNCTION}",
        "WARNING at {file}:{line} {function}",
        _TRACE_END,
    ),
    _rule(
        "WARNING",
        rf"^WARNING: (?P<file>\S+):(?P<line>\d+) at {_FUNCTION}",
        "WARNING at {file}:{line} {function}",
        _TRACE_END,
    ),
    _rule(
        "WARNING",
        r"^WARNING: CPU: \d+ PID: \d+ at (?P<file>\S+):(?P<line>\d+)",
        "WARNING at {file}:{line}",
        _TRACE_END,
    ),
    _rule(
        "BUG",
        r"^kernel BUG at (?P<file>\S+?):(?P<line>\d+)!",
        "kernel BUG at {file}:{line}",
        _TRACE_END,
    ),
    _rule("KASAN", rf"^BUG: (?P<what>KASAN: \S+) in {_FUNCTION}", "{what} in {function}", _BAR),
    _rule("KASAN", r"^BUG: (?P<what>KASAN: .*)", "{what}", _BAR),
    _rule("KFENCE", rf"^BUG: (?P<what>KFENCE: .+?) in {_FUNCTION}", "{what} in {function}", _BAR),
    _rule("KCSAN", r"^BUG: (?P<what>KCSAN: .*)", "{what}", _BAR),
    _rule("KMSAN", rf"^BUG: (?P<what>KMSAN: \S+) in {_FUNCTION}", "{what} in {function}", _BAR),
    _rule(
        "UBSAN",
        r"^UBSAN: (?P<what>[\w-]+) in (?P<file>\S+?):(?P<line>\d+)(?::\d+)?",
        "UBSAN: {what} at {file}:{line}",
        re.compile(r"^(?:---\[ end trace|={10,}$)"),
    ),
    _rule(
        "sleeping function",
        r"^BUG: sleeping function called from invalid context at (?P<file>\S+?):(?P<line>\d+)",
        "sleeping function called from invalid context at {file}:{line}",
        _TASK_END,
    ),
    _rule(
        "scheduling while atomic",
        r"^BUG: scheduling while atomic: (?P<task>[^/]+)/",
        "scheduling while atomic: {task}",
        _TASK_END,
    ),
    _rule(
        "soft lockup",
        r"^(?:watchdog: )?BUG: soft lockup - CPU#\d+ stuck for \d+s! \[(?P<task>.+?):\d+\]",
        "soft lockup in {task}",
        _TASK_END,
        places=True,
    ),
    _rule(
        "hard lockup",
        r"^(?:watchdog: )?(?:CPU\d+: )?Watchdog detected hard LOCKUP",
        "hard lockup",
        _TASK_END,
        places=True,
    ),
    _rule("workqueue lockup", r"^BUG: workqueue lockup", "workqueue lockup"),
    _rule(
        "Oops",
        r"^BUG: (?P<what>kernel NULL pointer dereference)",
        "{what}",
        _TRACE_END,
        places=True,
    ),
    _rule("Oops", r"^BUG: (?P<what>unable to handle [^:,]+)", "{what}", _TRACE_END, places=True),
    _rule(
        "Oops", r"^(?P<what>(?:Oops: )?general protection fault)", "{what}", _TRACE_END, places=True
    ),
    _rule(
        "Oops",
        r"^(?:Internal error: )?Oops(?:: Oops)?: (?P<what>[^\[#]*)",
        "Oops: {what}",
        _TRACE_END,
        places=True,
    ),
    _rule("Oops", r"^traps: (?P<what>.*) in kernel mode", "{what}", _TRACE_END, places=True),
    _rule(
        "slab corruption",
        r"^BUG (?P<cache>\S+) \((?:Not tainted|Tainted)[^)]*\): (?P<what>.*)",
        "slab corruption in {cache}: {what}",
        re.compile(r"^FIX |^ ?</TASK>"),
    ),
    _rule(
        "lockdep",
        r"^(?:WARNING|BUG): (?P<what>possible (?:recursive locking|circular locking dependency|"
        r"irq lock inversion dependency|deadlock)[^\n]*|inconsistent lock state|"
        r"bad unlock balance detected!|held lock freed!|Nested lock was not taken|"
        r"[\w-]+-safe -> [\w-]+-unsafe lock order detected|"
        r"lock held when returning to user space!|"
        r".*still has locks held!|bad contention detected!|invalid wait context.*|"
        r"MAX_LOCK.* too low!.*)",
        "lockdep: {what}",
        _TASK_END,
    ),
    _rule("lockdep", r"^\[ BUG: (?P<what>.*?) \]$", "lockdep: {what}", _TASK_END),
    _rule(
        "lockdep",
        r"^INFO: (?P<what>trying to register non-static key)",
        "lockdep: {what}",
        _TASK_END,
    ),
    _rule("RCU usage", r"^WARNING: (?P<what>suspicious RCU usage)", "{what}", _TASK_END),
    _rule(
        "hung task",
        r"^INFO: task (?P<task>.+?):\d+ (?:<.*> )?blocked (?:on .* )?for more than",
        "hung task {task}",
        _TASK_END,
    ),
    _rule(
        "RCU stall",
        r"^(?:rcu: )?INFO: (?P<what>rcu\w* (?:self-)?detected (?:expedited )?stalls?)\b",
        "{what}",
        _TASK_END,
        places=True,
    ),
    _rule("RCU stall", r"^(?:rcu: )?(?P<what>rcu\w* kthread starved) for", "{what}", _TASK_END),
    _rule("refcount", r"^(?P<what>refcount_t: .*?\.)$", "{what}", _TRACE_END, places=True),
    _rule(
        "list corruption",
        r"^(?P<what>(?:list|hlist)_(?:add|del)\w* corruption)",
        "{what}",
        _TRACE_END,
        places=True,
    ),
    _rule(
        "kmemleak",
        r"^kmemleak: (?P<what>\d+) new suspected memory leaks",
        "kmemleak: {what} new suspected memory leaks",
    ),
    _rule(
        "page allocation failure",
        r"^(?P<task>.+?): page allocation failure: order:(?P<order>\d+)",
        "page allocation failure in {task}, order {order}",
        re.compile(r"^Mem-Info:"),
    ),
    _rule(
        "out of memory",
        r"^Out of memory: Killed process \d+ \((?P<task>.*?)\)",
        "out of memory: {task} killed",
    ),
    _rule(
        "reference leak",
        r"^unregister_netdevice: waiting for (?P<what>\S+) to become free",
        "unregister_netdevice: waiting for {what} to become free",
    ),
    _rule(
        "panic",
        r"^Kernel panic - not syncing: (?P<what>.*)",
        "Kernel panic: {what}",
        re.compile(r"^---\[ end Kernel panic"),
        places=True,
    ),
    _rule("BUG", r"^BUG: (?P<what>[^\n]*)", "BUG: {what}", _TASK_END),
)

KINDS = tuple(dict.fromkeys(rule.kind for rule in _RULES))

_PLACE = re.compile(rf"^(?:RIP: [0-9a-f]{{4}}:|pc : ){_FUNCTION}")
# These follow the line that names a fault, or give its place; no fault of their own.
_FOLLOWS = {
    "refcount": {"WARNING"},
    "list corruption": {"WARNING", "BUG", "Oops"},
    "BUG": {"Oops"},
    "Oops": {"Oops"},
    "KASAN": {"Oops"},
    "page allocation failure": {"WARNING"},
}
_TAINT = re.compile(r" (?:Tainted: .*|Not tainted.*)$")
_NUMBERS = re.compile(r"\b0x[0-9a-f]+\b|\b[0-9a-f]{12,16}\b|\[#\d+\]")


@dataclass
class _Open:
    offset: int
    lines: list[str]
    rule: _Rule | None = None
    title: str = ""
    place: str = ""
    registers: bool = False  # whether they were printed: what follows is another fault


class Scanner:
    """Fed with a console's bytes in any pieces; gives splats as they end."""

    def __init__(self, node: str = "", offset: int = 0) -> None:
        self._node = node
        self._offset = offset  # of the first byte of _partial
        self._partial = b""
        self._open: _Open | None = None

    @property
    def open(self) -> bool:
        """Whether a splat has started and its end was not seen yet."""
        return self._open is not None

    def feed(self, data: bytes) -> list[Splat]:
        """Splats that ended in this piece."""
        found: list[Splat] = []
        buffer = self._partial + data
        start = 0
        while (end := buffer.find(b"\n", start)) >= 0:
            found += self._line(buffer[start:end], self._offset + start)
            start = end + 1
        self._offset += start
        self._partial = buffer[start:]
        if len(self._partial) > 16 * _LINE_LIMIT:  # noise without a newline
            found += self._line(self._partial, self._offset)
            self._offset += len(self._partial)
            self._partial = b""
        return found

    def finish(self) -> list[Splat]:
        """What is open at the end, a last line without its newline included."""
        found: list[Splat] = []
        if self._partial:
            found += self._line(self._partial, self._offset)
            self._offset += len(self._partial)
            self._partial = b""
        return found + self._close(complete=False)

    def _line(self, raw: bytes, offset: int) -> list[Splat]:
        line = clean(raw[:_LINE_LIMIT])
        if line.startswith(_BOOT):
            # A guest that is stopped at its panic never prints the panic's end; what comes
            # next in its file is another boot.
            return self._close(complete=False)
        if line.startswith(_CUT):
            before = self._open
            kind = before.rule.kind if before and before.rule else ""
            if before and kind == "list corruption" and len(before.lines) <= 2:
                before.lines.append(line)  # CHECK_DATA_CORRUPTION() names it, then does BUG()
                return []
            found = self._close(complete=False)
            self._open = _Open(offset, [line])
            return found
        matched = _match(line)
        if self._open is None:
            if matched is None:
                return []
            rule, title = matched
            self._open = _Open(offset, [line], rule, title)
            return self._close(complete=True) if rule.end is None else []
        return self._continue(self._open, line, offset, matched)

    def _continue(
        self, splat: _Open, line: str, offset: int, matched: tuple[_Rule, str] | None
    ) -> list[Splat]:
        if matched is not None:
            rule, title = matched
            if splat.rule is None:
                splat.rule, splat.title = rule, title
            elif rule.kind in _FOLLOWS.get(splat.rule.kind, ()) and not splat.registers:
                if rule.kind in ("WARNING", "BUG") and " at " in title:
                    splat.place = " at " + title.split(" at ", 1)[1]
            else:
                found = self._close(complete=False)
                self._open = _Open(offset, [line], rule, title)
                return found + (self._close(complete=True) if rule.end is None else [])
        splat.lines.append(line)
        if splat.rule is None:
            if len(splat.lines) > _HEAD_LINES:
                self._open = None
            return []
        if place := _PLACE.match(line):
            splat.registers = True
            if splat.rule.places and not splat.place:
                splat.place = " in " + place["function"]
        end = splat.rule.end
        ended = end is not None and end.match(line) is not None
        if ended or len(splat.lines) >= _SPLAT_LINES:
            return self._close(complete=ended)
        return []

    def _close(self, *, complete: bool) -> list[Splat]:
        splat, self._open = self._open, None
        if splat is None or splat.rule is None:
            return []
        title = splat.title + splat.place
        text = "\n".join(splat.lines)
        return [Splat(self._node, splat.rule.kind, title, text, splat.offset, complete)]


def clean(raw: bytes) -> str:
    """One console line without carriage returns, escapes, time stamp and caller."""
    text = _ESCAPE.sub("", raw.decode(errors="replace"))
    # A CR in the middle is what a terminal would have overwritten.
    text = text.strip("\r").rsplit("\r", 1)[-1]
    return _PREFIX.sub("", text).rstrip()


def _match(line: str) -> tuple[_Rule, str] | None:
    for rule in _RULES:
        if found := rule.start.match(line):
            groups = {key: value or "" for key, value in found.groupdict().items()}
            if "file" in groups:
                groups["file"] = PurePosixPath(groups["file"]).name
            if "what" in groups:
                groups["what"] = _NUMBERS.sub("", _TAINT.sub("", groups["what"])).strip(" .,:")
            return rule, " ".join(rule.title.format(**groups).split())
    return None


class ConsoleFile:
    """A console file that a guest is still writing to."""

    def __init__(self, node: str, path: Path, offset: int = 0) -> None:
        self.path = path
        self._node = node
        self._offset = offset
        self._scanner = Scanner(node, offset)

    @property
    def offset(self) -> int:
        """Bytes read so far."""
        return self._offset

    @property
    def open(self) -> bool:
        """Whether a splat has started and its end was not seen yet."""
        return self._scanner.open

    def poll(self) -> list[Splat]:
        """Splats that ended in what was written since the last call. A file that does not
        exist yet is empty; one that shrank is read from its start."""
        found: list[Splat] = []
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    found = self._scanner.finish()
                    self._offset = 0
                    self._scanner = Scanner(self._node)
                file.seek(self._offset)
                while data := file.read(1 << 20):
                    self._offset += len(data)
                    found += self._scanner.feed(data)
        except FileNotFoundError:
            return found
        return found

    def finish(self) -> list[Splat]:
        """Like ``poll``, and a splat that has not ended is given as it is."""
        return self.poll() + self._scanner.finish()

    def tail(self, lines: int = 60) -> str:
        """The console's last lines as text, as they are."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - 200 * lines))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.replace("\r", "").splitlines()[-lines:])


@dataclass(frozen=True)
class Allowed:
    """One entry of the allow-list: a splat whose title or text ``match`` finds (a regular
    expression), of that ``kind`` if given, fails no test. ``reason`` says why it may
    appear, ``remove`` when this entry has to go."""

    match: re.Pattern[str]
    reason: str
    remove: str
    kind: str = ""

    def allows(self, splat: Splat) -> bool:
        return (not self.kind or self.kind == splat.kind) and (
            self.match.search(splat.title) is not None or self.match.search(splat.text) is not None
        )


def read_allowed(path: Path) -> tuple[Allowed, ...]:
    """The allow-list of ``path``: TOML, ``[[splat]]`` tables with ``match``, ``reason``,
    ``remove`` and optionally ``kind``.

    Raises UsageError for a file that is none, or an entry without its reason or removal
    condition.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: no allow-list", seen=str(error), todo="mend the file") from error
    entries = data.get("splat", [])
    if set(data) - {"splat"} or not isinstance(entries, list):
        raise UsageError(f"{path}: only [[splat]] tables may be there", seen=", ".join(data))
    return tuple(_allowed(f"{path}: splat {n}", entry) for n, entry in enumerate(entries, 1))


def _allowed(where: str, entry: object) -> Allowed:
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is no table", seen=repr(entry), todo="write [[splat]]")
    for key, meaning in (
        ("match", "a regular expression for the title or the text"),
        ("reason", "why this splat may appear"),
        ("remove", "the condition under which the entry is removed"),
    ):
        value = entry.get(key)
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f"{where} has no {key}", todo=f'add {key} = "...": {meaning}')
    if unknown := set(entry) - {"match", "reason", "remove", "kind"}:
        raise UsageError(f"{where} has unknown keys", seen=", ".join(sorted(unknown)))
    kind = entry.get("kind", "")
    if kind and kind not in KINDS:
        raise UsageError(
            f"{where}: no such kind", seen=repr(kind), todo=f"one of {', '.join(KINDS)}"
        )
    try:
        pattern = re.compile(entry["match"])
    except re.error as error:
        raise UsageError(f"{where}: match is no regular expression", seen=str(error)) from error
    return Allowed(pattern, entry["reason"], entry["remove"], kind)


def unexpected(splats: Iterable[Splat], allowed: Iterable[Allowed]) -> Iterator[Splat]:
    """The splats that no entry of the allow-list allows."""
    entries = tuple(allowed)
    return (splat for splat in splats if not any(entry.allows(splat) for entry in entries))
