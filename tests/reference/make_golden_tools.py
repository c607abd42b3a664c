#!/usr/bin/env python3
"""Writes the reference cases for tools in chat templates, from transformers' rendering of published templates.

    pip install transformers jinja2
    python make_golden_tools.py GOLDEN_DATA_DIR

tools.json    per template: a conversation with tools, calls and reasoning -> its text, with and without the generation prompt
"""
import json, pathlib, sys

from transformers.utils.chat_template_utils import render_jinja_template

DATA = pathlib.Path(sys.argv[1])
SPECIAL = dict(bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>")

WEATHER = dict(type="function", function=dict(
    name="weather", description="The weather in a city, \"as it is\" in °C.",
    parameters=dict(type="object", properties=dict(city=dict(type="string"), days=dict(type="integer", default=1)), required=["city"])))
TIME = dict(type="function", function=dict(name="time", description="Now.", parameters=dict(type="object", properties={})))
CALL = [dict(id="abcdefghi", type="function", function=dict(name="weather", arguments=dict(city="Zürich", days=2)))]
TURNS = [
    dict(role="user", content="Rain in Zürich?"),
    dict(role="assistant", content="", tool_calls=CALL, reasoning_content="I have to look."),
    dict(role="tool", content='{"rain": true}', name="weather", tool_call_id="abcdefghi"),
    dict(role="assistant", content="It rains.", reasoning_content="Rain is true."),
]
SYSTEM = dict(role="system", content="Be brief.")

cases = []
for name in ["qwen25", "qwen3", "mistral_v03"]:
    template = (DATA / "chat_templates" / f"{name}.jinja").read_text()
    for messages in [TURNS, [SYSTEM, *TURNS]]:
        for tools in [[WEATHER], [WEATHER, TIME]]:
            render = lambda **more: render_jinja_template([messages], tools=tools, chat_template=template, **SPECIAL, **more)[0][0]
            cases.append(dict(template=name, messages=messages, tools=tools, whole=render(), asked=render(add_generation_prompt=True)))
(DATA / "tools.json").write_text(json.dumps(cases, ensure_ascii=False, indent=1) + "\n")
