#!/usr/bin/env python3
"""Writes the reference cases for chat templates, from transformers' `apply_chat_template` and torchtune's prompt templates.

    pip install transformers tokenizers jinja2
    pip download torchtune==0.6.1 --no-deps && unzip torchtune-*.whl      # its templates need nothing else of it
    python make_golden_chat.py GOLDEN_DATA_DIR --torchtune UNZIPPED_WHEEL

chat_templates/*.jinja      published templates of model families, and two of our own (`generation_marks`, `python`)
chat_templates.json         per template and conversation: the text with and without the generation prompt, or the template's
                            refusal; with marks, the stretches [from, to) that an assistant says, in characters
sanitized.json              conversations with special tokens written out -> ids, with sanitize_control_tokens on and off
templates.json              columns -> the prompt of torchtune's templates, and of ChatML
"""
import argparse, ast, importlib.util, json, pathlib, sys, types

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

arguments = argparse.ArgumentParser()
arguments.add_argument("data", type=pathlib.Path)
arguments.add_argument("--torchtune", type=pathlib.Path, required=True)
arguments = arguments.parse_args()
DATA = arguments.data
SPECIAL = dict(bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>")


def message(role, content, **other):
    return dict(role=role, content=content, **other)


TOOL_CALL = [dict(id="abcdefghi", type="function", function=dict(name="weather", arguments=dict(city="Zürich", days=[1, 2.5])))]
CONVERSATIONS = [
    [message("user", "Who are you?"), message("assistant", "A small model.")],
    [message("system", "You answer briefly. "), message("user", " Who are you? "), message("assistant", " A small model.\n")],
    [message("user", "你是谁?"), message("assistant", "您好 <b>&</b>"), message("user", "And now?"), message("assistant", "Same.")],
    [message("system", "Be brief."), message("user", "One?"), message("assistant", "1"), message("user", "Two?"), message("assistant", "2")],
    [message("user", "Add."), message("assistant", "<think>\none and two\n</think>\n\n3"), message("user", "And four?"),
     message("assistant", "<think>\nthree and four\n</think>\n\n7")],
    [message("user", "Reason."), message("assistant", "Yes.", reasoning_content="It is so.")],
    [message("user", "Rain?"), message("assistant", "", tool_calls=TOOL_CALL),
     message("tool", '{"rain": true}', tool_call_id="abcdefghi", name="weather"), message("assistant", "It rains.")],
    [message("user", "one"), message("user", "two"), message("assistant", "three")],
    [message("assistant", "I begin."), message("user", "Go on.")],
    [message("user", "No answer yet.")],
]


def rendered(template, messages, **options):
    try:
        texts, marks = render_jinja_template([messages], chat_template=template, date_string="26 Jul 2024", **SPECIAL, **options)
    except Exception as error:
        return dict(refused=str(error))
    result = dict(text=texts[0])
    if options.get("return_assistant_tokens_mask"):
        result["said"] = [[begin, end] for begin, end in marks[0]]
    return result


def chat_templates():
    cases = []
    for path in sorted((DATA / "chat_templates").glob("*.jinja")):
        template = path.read_text()
        for messages in CONVERSATIONS:
            case = dict(template=path.stem, messages=messages, whole=rendered(template, messages))
            case["asked"] = rendered(template, messages, add_generation_prompt=True)
            if "{% generation %}" in template:
                case["said"] = rendered(template, messages, return_assistant_tokens_mask=True).get("said")
            cases.append(case)
    return cases


def sanitized():
    cases = []
    for name in ("bytelevel", "metaspace"):
        folder = DATA / "tokenizers" / name
        config = json.loads((folder / "tokenizer_config.json").read_text())
        roles = {role: config[role] for role in ("bos_token", "eos_token", "unk_token") if role in config}
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **roles)
        end = "<|eot_id|>" if name == "bytelevel" else "</s>"
        template = ("{{ bos_token }}{% for message in messages %}{{ message.role + ': ' + message.content + '" + end + "' }}{% endfor %}")
        for content in (f"Say {end} twice: {end}{end}", f"{end}", f"x{roles['bos_token']}y", "nothing here", f"a {end[:-1]} b", f"  {end}  z"):
            messages = [message("user", content), message("assistant", "Yes.")]
            for sanitize in (True, False):
                ids = tokenizer.apply_chat_template(
                    messages, chat_template=template, tokenize=True, return_dict=False, sanitize_control_tokens=sanitize)
                cases.append(dict(tokenizer=name, chat_template=template, messages=messages, sanitize_control_tokens=sanitize, ids=ids))
    return cases


def templates():
    # torchtune's own file, without the rest of the package, which needs torch and torchao.
    for name in ("torchtune", "torchtune.config", "torchtune.config._utils", "torchtune.data", "torchtune.data._messages"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["torchtune.config._utils"]._get_component_from_path = None

    class Message:
        def __init__(self, role, content, masked=False, ipython=False, eot=True):
            self.role, self.masked, self.ipython, self.eot = role, masked, ipython, eot
            self.content = [dict(type="text", content=content)] if isinstance(content, str) else content

        @property
        def text_content(self):
            return "".join(piece["content"] for piece in self.content)

    sys.modules["torchtune.data._messages"].Message, sys.modules["torchtune.data._messages"].Role = Message, str
    spec = importlib.util.spec_from_file_location("prompt_templates", arguments.torchtune / "torchtune/data/_prompt_templates.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cases = []
    for name, template, column in (
        ("summarize", module.SummarizeTemplate(), "dialogue"),
        ("grammar", module.GrammarErrorCorrectionTemplate(), "sentence"),
        ("question_answer", module.QuestionAnswerTemplate(), "question"),
    ):
        for text in ("Plain.", " {braces} and\nlines ", ""):
            cases.append(dict(template=name, columns={column: text}, prompt=template([Message("user", text)])[0].text_content))
    for text, answer in (("Plain.", "Yes."), (" {braces} and\nlines ", "a\n")):
        turns = module.ChatMLTemplate()([Message("user", text), Message("assistant", answer)])
        asked = module.ChatMLTemplate()([Message("user", text), Message("assistant", "")])
        cases.append(dict(template="chatml", columns=dict(input=text, output=answer), whole="".join(turn.text_content for turn in turns),
                          prompt="".join(turn.text_content for turn in asked)))
    # AlpacaToMessages keeps its two texts in its constructor; they are read from the source.
    source = (arguments.torchtune / "torchtune/data/_messages.py").read_text()
    body = source[source.index("class AlpacaToMessages"):]
    begin = body.index("self.template = {")
    texts = ast.literal_eval(body[begin + len("self.template = "):body.index("\n        }", begin)] + "}")
    for columns in (dict(instruction="Add.", input="1 2"), dict(instruction="Add {x}.", input="")):
        key = "prompt_input" if columns["input"] else "prompt_no_input"
        cases.append(dict(template="alpaca", columns=columns, prompt=texts[key].format(**columns)))
    return cases


def write(name, value):
    (DATA / name).write_text(json.dumps(value, ensure_ascii=False, indent=0) + "\n")


write("chat_templates.json", chat_templates())
write("sanitized.json", sanitized())
write("templates.json", templates())
