"""The chat of `octavo run`: history, several lines, and Ctrl-C that stops the answer and not the program."""

from __future__ import annotations

import sys
import termios
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from octavo.engine.types import SamplingParams
from octavo.errors import EngineDead, OctavoError
from octavo.tools.history import History
from octavo.tools.session import Answer, Session

PROMPT, MORE = ">>> ", "... "
SETTABLE = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "max_tokens": int, "seed": int,
    "repetition_penalty": float, "presence_penalty": float, "frequency_penalty": float,
}  # fmt: skip
KINDS = {int: "a whole number", float: "a number"}
HELP = f"""\
/clear                forget the conversation; the system prompt stays
/system [TEXT|none]   show, set or remove the system prompt
/set [NAME VALUE]     show or change a setting: {", ".join(SETTABLE)}
/set NAME default     change it back to what it was at the start
/help                 this list
/exit                 leave, as Ctrl-D does
Several lines: end each but the last with \\, or put \"\"\" before the first and after the last.
Ctrl-C stops an answer."""


class Chat:
    """One conversation in the terminal."""

    def __init__(self, session: Session, sampling: dict[str, Any], system: str | None) -> None:
        self.session, self.system = session, system
        self.params = SamplingParams(**{"max_tokens": None, **session.llm.default_params, **sampling})
        session.check_sampling(self.params)
        self.at_start = self.params
        self.turns: list[dict[str, str]] = []
        self.commands: dict[str, Callable[[str], None]] = {
            "clear": self._clear, "system": self._system, "set": self._set, "help": lambda _: print(HELP),
        }  # fmt: skip

    def loop(self) -> None:
        """Until /exit or Ctrl-D. Ctrl-C drops what is being typed or done. Raises EngineDead."""
        history = History()
        print(f"{self.session.llm.model_names[0]} · /help lists commands, Ctrl-D leaves", file=sys.stderr)
        going_on = True
        while going_on:
            try:
                text = read_message()
                history.add(text)
                going_on = self._take(text)
            except KeyboardInterrupt:
                print()
            except EOFError:
                print()
                return

    def _take(self, text: str) -> bool:
        """Whether to go on after this message or command."""
        word, _, rest = text.strip().partition(" ")
        if word.startswith("/"):
            self._command(word[1:], rest.strip())
        elif word:
            self._answer(text)
        return word != "/exit"

    def _answer(self, text: str) -> None:
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"role": "user", "content": text}
        answer = Answer()
        try:
            with echo_off():
                for piece in self.session.stream([*system, *self.turns, asked], self.params, answer, capped=True):
                    print(printable(piece), end="", flush=True)
            print()
        except KeyboardInterrupt:
            print("\n[stopped]", file=sys.stderr)
        except EngineDead:
            raise
        except OctavoError as error:
            print(f"error: {error}" + ("; /clear starts anew" if self.turns else ""), file=sys.stderr)
            return
        self.turns += [asked, {"role": "assistant", "content": answer.text}]
        print(f"[{answer.summary()}]", file=sys.stderr)

    def _command(self, name: str, rest: str) -> None:
        if name in self.commands:
            self.commands[name](rest)
        elif name != "exit":
            print(f"unknown command /{name}; /help lists them", file=sys.stderr)

    def _clear(self, _: str) -> None:
        self.turns.clear()
        kept = "; the system prompt stays (/system none removes it)" if self.system else ""
        print(f"the conversation is forgotten{kept}")

    def _system(self, text: str) -> None:
        if text:
            self.system = None if text == "none" else text
        print(f"system: {self.system or '(none)'}")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not rest:
            print("\n".join(f"{name} {getattr(self.params, name)}" for name in SETTABLE))
        elif name not in SETTABLE or not value.strip():
            print(f"usage: /set NAME VALUE, where NAME is one of {', '.join(SETTABLE)}", file=sys.stderr)
        else:
            self._change(name, value.strip())

    def _change(self, name: str, value: str) -> None:
        try:
            new = getattr(self.at_start, name) if value == "default" else SETTABLE[name](value)
            changed = msgspec.structs.replace(self.params, **{name: new})
            self.session.check_sampling(changed)
        except ValueError:
            kind = KINDS[SETTABLE[name]]
            print(f"error: {name} must be {kind}, or default, and not {value!r}", file=sys.stderr)
        except OctavoError as error:
            print(f"error: {error}", file=sys.stderr)
        else:
            self.params = changed
            print(f"{name} {getattr(changed, name)}")


def read_message() -> str:
    """The next message, of one or several lines. Raises EOFError at the end of input."""
    line = input(PROMPT)
    if line.lstrip().startswith('"""'):
        lines = [line.lstrip()[3:]]
        while not lines[-1].rstrip().endswith('"""'):
            lines.append(input(MORE))
        lines[-1] = lines[-1].rstrip()[:-3]
        return "\n".join(lines).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(MORE))
    return "\n".join(lines)


def printable(text: str) -> str:
    """Without control characters: an answer must not steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


@contextmanager
def echo_off() -> Iterator[None]:
    """Keys pressed meanwhile do not show among what is printed; they stand in the next line that is read."""
    try:
        before = termios.tcgetattr(sys.stdin)
    except (termios.error, ValueError):  # no terminal
        yield
        return
    silent = [*before]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
