"""Programs of SGLang's frontend language (`import sglang as sgl`) against our server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
import sglang as sgl

from bench.servers import Server

Knows = Callable[[str, str], bool]

CAPITAL = "The capital of France is"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Paris", "London", "Berlin"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def backend(neo: Server) -> Iterator[Any]:
    """The shared server as the programs' default backend."""
    endpoint = sgl.RuntimeEndpoint(neo.url, chat_template_name="chatml")
    sgl.set_default_backend(endpoint)
    yield endpoint
    sgl.set_default_backend(None)


def test_gen(neo: Server, knows: Knows) -> None:
    @sgl.function
    def capital(s: Any) -> None:
        s += CAPITAL
        s += sgl.gen("answer", max_tokens=8, temperature=0)

    state = capital.run()
    assert knows("Paris", state["answer"])
    assert state.text() == CAPITAL + state["answer"]
    assert state["answer"] == neo.generate(text=CAPITAL, max_new_tokens=8)["text"]


def test_gen_twice_continues_the_text() -> None:
    @sgl.function
    def story(s: Any) -> None:
        s += "One day a fox met a"
        s += sgl.gen("first", max_tokens=6, temperature=0, ignore_eos=True)
        s += " Then the fox said:"
        s += sgl.gen("second", max_tokens=6, temperature=0, stop="\n")

    state = story.run()
    assert state.text() == "One day a fox met a" + state["first"] + " Then the fox said:" + state["second"]
    assert state["first"] and "\n" not in state["second"]


def test_chat_roles(knows: Knows) -> None:
    @sgl.function
    def chat(s: Any, question: str) -> None:
        s += sgl.system("You are a helpful assistant.")
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))

    state = chat.run(question="What is the capital of France? Answer in one sentence.")
    assert knows("Paris", state["answer"])
    assert [message["role"] for message in state.messages()] == ["system", "user", "assistant"]
    assert state.messages()[-1]["content"].strip() == state["answer"].strip()


def test_fork_and_join(neo: Server) -> None:
    topics = ["water", "fire"]
    begin = "Here are short facts about the elements.\n"

    @sgl.function
    def facts(s: Any) -> None:
        s += begin
        forks = s.fork(len(topics))
        for fork, topic in zip(forks, topics, strict=True):
            fork += f"A fact about {topic}: {topic} is"
            fork += sgl.gen("fact", max_tokens=8, temperature=0, ignore_eos=True)
        forks.join()
        for fork, topic in zip(forks, topics, strict=True):
            s += f"{topic} is" + fork["fact"] + "\n"
        s += "To sum up,"
        s += sgl.gen("summary", max_tokens=4, temperature=0, ignore_eos=True)

    def alone(text: str, tokens: int) -> str:
        answer: str = neo.generate(text=text, max_new_tokens=tokens, ignore_eos=True)["text"]
        return answer

    state = facts.run()
    said = [f"{topic} is" + alone(f"{begin}A fact about {topic}: {topic} is", 8) + "\n" for topic in topics]
    whole = begin + "".join(said) + "To sum up,"
    assert state.text() == whole + state["summary"]
    assert state["summary"] == alone(whole, 4)


def test_select(knows: Knows) -> None:
    choices = ["Paris", "a banana", "Tuesday"]

    @sgl.function
    def capital(s: Any) -> None:
        s += CAPITAL + " "
        s += sgl.select("city", choices=choices)

    state = capital.run()
    assert state["city"] in choices and knows("Paris", state["city"])
    assert state.text() == f"{CAPITAL} {state['city']}"


def test_regex() -> None:
    pattern = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])"

    @sgl.function
    def date(s: Any) -> None:
        s += "The month of the moon landing, written as year and month, was "
        s += sgl.gen("date", max_tokens=16, temperature=0, regex=pattern)

    assert re.fullmatch(pattern, date.run()["date"])


def test_json_schema() -> None:
    @sgl.function
    def person(s: Any) -> None:
        s += "A person as a JSON object: "
        s += sgl.gen("person", max_tokens=128, temperature=0, json_schema=json.dumps(PERSON))

    jsonschema.validate(json.loads(person.run()["person"]), PERSON)


@pytest.mark.parametrize("temperature", [0, 1])
def test_constrained_and_free_side_by_side(knows: Knows, temperature: float) -> None:
    """A batch in which only some rows have a grammar: the mask must hit those rows alone."""

    @sgl.function
    def digits(s: Any, pattern: str | None) -> None:
        s += CAPITAL
        s += sgl.gen("out", max_tokens=8, temperature=temperature, regex=pattern)

    states = digits.run_batch([{"pattern": p} for p in (r"[0-9]{3}", None, r"[xyz]{4}")], num_threads=3)
    first, free, third = (state["out"] for state in states)
    assert re.fullmatch(r"[0-9]{3}", first)
    assert re.fullmatch(r"[xyz]{4}", third)
    assert free
    if temperature == 0:
        assert knows("Paris", free)


def test_run_batch_keeps_order(knows: Knows) -> None:
    capitals = {"France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid"}

    @sgl.function
    def capital(s: Any, country: str) -> None:
        s += f"The capital of {country} is"
        s += sgl.gen("answer", max_tokens=6, temperature=0)

    states = capital.run_batch([{"country": country} for country in capitals], num_threads=4)
    for state, (country, city) in zip(states, capitals.items(), strict=True):
        assert state.text().startswith(f"The capital of {country} is")
        assert knows(city, state["answer"])


def test_stream() -> None:
    @sgl.function
    def capital(s: Any) -> None:
        s += CAPITAL
        s += sgl.gen("answer", max_tokens=12, temperature=0, ignore_eos=True)

    state = capital.run(stream=True)
    pieces = list(state.text_iter())
    assert len(pieces) > 2
    assert "".join(pieces) == state.text()
    assert state["answer"] == capital.run()["answer"]
