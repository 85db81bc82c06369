"""Text <-> token ids: ``tokenizer.json`` folders, Kimi's ``tiktoken.model`` folders, chat templates, streaming."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

# the files that make up a tokenizer, in the order in which they are looked for
_FILES = ("tokenizer.json", "tiktoken.model", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class Backend(Protocol):
    """What turns text into ids and back. ``encode`` parses special tokens that the text spells out."""

    vocab_size: int  # one past the largest id

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    def token_id(self, token: str) -> int | None: ...


class JsonBackend:
    """A ``tokenizer.json`` read by the ``tokenizers`` package. Its truncation and padding settings are not used."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A model's tokenizer. Ids are Python integers; an id without a token decodes to nothing."""

    backend: Backend
    bos_token: str | None = None
    eos_token: str | None = None
    chat_template: str | None = None  # jinja2; None: the model is no chat model
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict, repr=False)  # what ``save`` writes

    @classmethod
    def from_tokenizers(
        cls,
        tokenizer: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        chat_template: str | None = None,
    ) -> "Tokenizer":
        """Wrap a ``tokenizers.Tokenizer``; what ``save`` then writes, transformers' ``AutoTokenizer`` reads too."""
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos_token, "eos_token": eos_token}
        if chat_template is not None:
            settings["chat_template"] = chat_template
        files = {
            "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
            "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
        }
        return cls(JsonBackend(tokenizer), bos_token, eos_token, chat_template, files)

    @property
    def vocab_size(self) -> int:
        """One past the largest id; a model's embedding may have more rows, or (Kimi-Linear) two rows fewer."""
        return self.backend.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self.backend.token_id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self.backend.token_id(self.eos_token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``. Special tokens spelled out in it become their ids.

        ``add_special_tokens`` adds what the folder says goes around a text (often nothing).
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a string, got {type(text).__name__}")
        return list(self.backend.encode(text, add_special_tokens))

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        ids = [int(i) for i in ids]
        if ids and min(ids) < 0:
            raise ValueError(f"ids must not be negative, got {min(ids)}")
        return self.backend.decode(ids, skip_special_tokens)

    def stream(self, *, skip_special_tokens: bool = True) -> "StreamDecoder":
        """A decoder for ids that arrive a few at a time."""
        return StreamDecoder(self, skip_special_tokens)

    def apply_chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Ids of a conversation laid out by the model's chat template, ready for the assistant's answer.

        ``messages`` is a list of ``{"role": ..., "content": ...}``, or a string for a single message of the user.
        Raises ``ValueError`` when the model has no template or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template, so messages can't be laid out; encode a plain text")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        text = _render(
            self.chat_template,
            messages=list(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            bos_token=self.bos_token or "",
            eos_token=self.eos_token or "",
        )
        return self.encode(text, add_special_tokens=False)

    def save(self, path: str | Path) -> None:
        """Write the tokenizer's files into the folder ``path``."""
        for name, content in self.files.items():
            (Path(path) / name).write_bytes(content)


class StreamDecoder:
    """Turns ids into text as they come, holding back bytes that are not a complete character yet.

    The pieces that ``feed`` and the final ``flush`` return add up to the text of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []  # the last ids whose text was given out, then those still held
        self._given = 0  # how many of _ids were given out

    def feed(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` complete; "" while a character is incomplete."""
        self._ids.extend(int(i) for i in ids)
        text = self._new_text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._ids, self._given = self._ids[self._given :], len(self._ids) - self._given
        return text

    def flush(self) -> str:
        """The text of what is still held, an incomplete character as U+FFFD."""
        text = self._new_text()
        self._given = len(self._ids)
        return text

    def _new_text(self) -> str:
        # ids given out before stay in front: some decoders strip a space at the start of a text
        before = self._tokenizer.decode(self._ids[: self._given], skip_special_tokens=self._skip)
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)[len(before) :]


def load_tokenizer(path: str | Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder; None when it has none.

    ``tokenizer.json`` is preferred; ``tiktoken.model`` needs the ``tiktoken`` package (the ``kimi`` extra). The chat
    template is ``chat_template.jinja``, else ``tokenizer_config.json``'s, else for ``tiktoken.model`` Kimi's.
    Raises ``ValueError`` naming the file that can't be read, or the extra that is not installed.
    """
    path = Path(path)
    files = {name: (path / name).read_bytes() for name in _FILES if (path / name).is_file()}
    settings = _read_settings(path / "tokenizer_config.json", files.get("tokenizer_config.json"))
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    if "chat_template.jinja" in files:
        template = files["chat_template.jinja"].decode()
    bos, eos = _token_text(settings.get("bos_token")), _token_text(settings.get("eos_token"))
    if "tokenizer.json" in files:
        try:
            tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # the package raises plain Exception
            raise ValueError(f"{path / 'tokenizer.json'}: not a readable tokenizer ({error})") from None
        return Tokenizer(JsonBackend(tokenizer), bos, eos, template, files)
    if "tiktoken.model" in files:
        from kda_jax import kimi_tokenizer

        names = {int(i): entry["content"] for i, entry in settings.get("added_tokens_decoder", {}).items()}
        backend = kimi_tokenizer.KimiBackend(files["tiktoken.model"], names, path / "tiktoken.model")
        return Tokenizer(
            backend,
            bos or kimi_tokenizer.BOS,
            eos or kimi_tokenizer.EOS,
            template or kimi_tokenizer.CHAT_TEMPLATE,
            files,
        )
    return None


def _read_settings(file: Path, content: bytes | None) -> Mapping[str, Any]:
    try:
        settings = json.loads(content) if content is not None else {}
    except ValueError as error:
        raise ValueError(f"{file}: not readable ({error})") from None
    if not isinstance(settings, Mapping):
        raise ValueError(f"{file}: must hold an object, got {type(settings).__name__}")
    return settings


def _token_text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token


def _render(template: str, **variables: Any) -> str:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(template).render(**variables)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refused the messages: {error}") from None


def _to_json(value: Any, indent: int | None = None, separators: tuple[str, str] | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
