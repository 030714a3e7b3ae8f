"""The template of a model folder, read without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rlinf_workers.agents.pictures import PictureText
from rlinf_workers.agents.templates.base import ChatTemplate, TemplateRefused
from rlinf_workers.agents.templates.jinja import JinjaTemplate
from rlinf_workers.agents.templates.plain import PlainTemplate
from rlinf_workers.agents.templates.tokens import TokenText
from rlinf_workers.models.picture_texts import PICTURE_TEXTS


def template_of_folder(
    folder: str | Path, options: Mapping[str, Any] | None = None, *, ends: Sequence[int] = ()
) -> ChatTemplate:
    """The chat template of a model folder; `PlainTemplate` for a folder without one.

    Args:
        folder: contains tokenizer.json, and mostly tokenizer_config.json and chat_template.jinja.
        options: variables of the template, such as `enable_thinking`.
        ends: tokens at which the engine ends a turn.

    Raises: TemplateRefused.
    """
    folder = Path(folder)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise TemplateRefused(f"{tokenizer} does not exist; a model whose agents use tools needs a fast tokenizer")
    config = _read_json(folder / "tokenizer_config.json")
    special = {
        role: token["content"] if isinstance(token, dict) else token
        for role, token in config.items()
        if role.endswith("_token") and isinstance(token, dict | str)
    }
    text = TokenText(Tokenizer.from_file(str(tokenizer)), special)
    source = _template_source(folder, config)
    if source is None:
        if options:
            raise TemplateRefused(f"{folder} has no chat template that could have the options {', '.join(options)}")
        return PlainTemplate(text, ends=ends, picture=_picture_text(folder, text))
    return JinjaTemplate(text, source, options=options, ends=ends, picture=_picture_text(folder, text))


def _picture_text(folder: Path, text: TokenText) -> PictureText | None:
    """None for a model that reads text alone."""
    config = _read_json(folder / "config.json")
    around, token = PICTURE_TEXTS.get(config.get("model_type", "")), config.get("image_token_id")
    placeholder = next((one for one, index in text.added.items() if index == token), None)
    if around is None or token is None or placeholder is None:
        return None
    return PictureText(placeholder, token, around)


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # named ones
        by_name = {entry["name"]: entry["template"] for entry in source}
        source = by_name.get("default") or by_name.get("tool_use")
    return source or None


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
