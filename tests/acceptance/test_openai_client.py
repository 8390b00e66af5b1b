"""The official client, unchanged, against the real server, engine and models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.acceptance.broker import MODELS, Broker, broker

WHO = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory, llama_server: Path, demo_models: Path) -> Iterator[Broker]:
    with broker(tmp_path_factory.mktemp("b"), llama_server, demo=demo_models) as running:
        running.write_manifest(
            "vectors", id="vectors", path=str(demo_models / "robin.gguf"), vram="40MiB", category="embedding"
        )
        running.stop()
        yield running.start()


@pytest.fixture
def client(subject: Broker) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=subject.url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("model", MODELS)
def test_each_model_answers_with_its_own_name(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=WHO, max_tokens=48, temperature=0)
    assert model.title() in (answer.choices[0].message.content or "")
    assert answer.model == model


@pytest.mark.parametrize("model", MODELS)
def test_a_stream_is_the_same_answer_in_pieces(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=WHO, max_tokens=48, temperature=0)
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(
            model=model, messages=WHO, max_tokens=48, temperature=0, stream=True
        )
        if chunk.choices
    ]
    assert len(pieces) > 3
    assert "".join(pieces) == whole.choices[0].message.content


def test_plain_completions_work(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="robin", prompt="GPU memory", max_tokens=8, temperature=0)
    assert answer.choices[0].text


def test_embeddings_work(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="vectors", input=["a lease", "a slot"])
    assert len(answer.data) == 2
    assert len(answer.data[0].embedding) == len(answer.data[1].embedding) > 8
    assert answer.data[0].embedding != answer.data[1].embedding


def test_models_are_listed_with_state_context_and_size(client: openai.OpenAI) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert set(MODELS) <= set(listed)
    extra = listed["robin"].model_extra or {}
    assert {"state", "context", "size_bytes"} <= set(extra), extra


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="robbin", messages=WHO, max_tokens=4)
    assert caught.value.code == "model_not_found"
    assert "robin" in caught.value.message, "the nearest name is offered"


async def test_the_async_client_streams(subject: Broker) -> None:
    async with openai.AsyncOpenAI(base_url=subject.url + "/v1", api_key="unused", max_retries=0) as client:
        text = ""
        stream = await client.chat.completions.create(
            model="wren", messages=WHO, max_tokens=48, temperature=0, stream=True
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        whole = await client.chat.completions.create(model="wren", messages=WHO, max_tokens=48, temperature=0)
    assert "Wren" in text
    assert text == whole.choices[0].message.content
