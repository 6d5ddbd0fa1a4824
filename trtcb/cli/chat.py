"""``trtcb chat``: a conversation in the terminal."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtcb.cli.engine_flags import CPU_ENGINE_HELP
from trtcb.cli.session import Session, print_piece
from trtcb.errors import RequestError

if TYPE_CHECKING:
    from trtcb.executor.request import SamplingParams

_HELP = "Say something. /reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C ends an answer."


def chat(
    plan: Annotated[Path | None, typer.Argument(help="The plan to talk to.", show_default=False)] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Talk to engines/<model>.plan instead.", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option(help="Instructions for the model.", show_default=False)] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 takes the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest share.")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Makes random draws repeatable.", show_default=False)] = None,
    num_blocks: Annotated[int | None, typer.Option(help="KV pool in blocks.", show_default=False)] = None,
    kv_memory: Annotated[str | None, typer.Option(help="KV pool in bytes, such as 2GiB.", show_default=False)] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the engine. [one a core]")] = None,
    cpu_engine: Annotated[str | None, typer.Option(help=CPU_ENGINE_HELP)] = None,
) -> None:
    """Talk to a plan. Every turn reuses the KV blocks of the conversation so far."""
    from trtcb.executor.request import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    settings = {
        "num_blocks": num_blocks,
        "kv_memory_bytes": kv_memory,
        "threads": threads,
        "cpu_engine": cpu_engine,
    }
    with Session.open(plan, model, settings) as session:
        print(_HELP)
        _converse(Conversation(session, params, system))


class Conversation:
    """What was said so far. An answer that fails or is interrupted leaves no trace, so that the user can ask again."""

    def __init__(self, session: Session, params: "SamplingParams", system: str | None) -> None:
        self._session = session
        self._params = params
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def reset(self) -> None:
        """Begin anew."""
        self.messages = list(self._opening)

    def say(self, text: str) -> None:
        """Print the model's answer to ``text``, and remember both."""
        messages = [*self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []

        def on_text(piece: str) -> None:
            pieces.append(piece)
            print_piece(piece)

        ids = self._session.llm.tokenizer.encode_chat(messages)
        self._session.generate(tuple(ids), self._params, on_text)
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]


def _converse(conversation: Conversation) -> None:
    while True:
        try:
            text = input("\n> ").strip()
        except EOFError:
            return
        if text == "/quit":
            return
        if text == "/reset":
            conversation.reset()
        elif text:
            try:
                conversation.say(text)
            except KeyboardInterrupt:
                print(" [interrupted]")
            except RequestError as error:  # such as a conversation that outgrew the context
                print(f"{error} (/reset begins anew)")
