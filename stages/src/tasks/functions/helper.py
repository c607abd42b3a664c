"""Runs functions that task files name. A request is a line of JSON; so is the answer, `{"value": …}` or `{"error": …}`.

What functions return stays here where only functions read it: an answer has its number (`keep`), until a request says `forget`.
"""

import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import random
import sys
import traceback
from contextlib import suppress
from pathlib import Path

# The channel is no longer standard output, and what functions print goes where messages go.
answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
requests = os.fdopen(os.dup(0), encoding="utf-8")
os.dup2(2, 1)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

modules = {}
kept = {}
places = itertools.count()


def named(function):
    """The function of a module's file, which is executed once."""
    file, name = function
    if file not in modules:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        module = importlib.util.module_from_spec(spec)
        seed()
        spec.loader.exec_module(module)
        modules[file] = module
    return getattr(modules[file], name)


def seed():
    """The harness's seeds: nothing depends on what ran before."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(1234)


def plain(value):
    """A value as JSON has it, with numpy's numbers and arrays among it."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        raise TypeError(f"returned {value}, which JSON has not")
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    raise TypeError(f"returned a {type(value).__name__}, which JSON has not")


def number(value):
    """A number as text, which also says what JSON has not; None of anything else."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return repr(float(value)) if isinstance(value, (bool, int, float)) else None


def keep(value):
    """Keeps a value for aggregations; what is answered of it: its place, and its number or two numbers."""
    place = next(places)
    kept[place] = value
    pair = [number(item) for item in value] if isinstance(value, (list, tuple)) and len(value) == 2 else [None]
    return {"kept": place, "number": number(value), "pair": None if None in pair else pair}


def versions(_):
    """Those of Python and of packages that functions are likely to use."""
    found = {"python": sys.version.split()[0]}
    for package in ("lm_eval", "datasets", "numpy"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def load(request):
    """Executes a module, and looks a function up in it."""
    named(request["function"])


def seeded(_):
    """Seeds random numbers before a task."""
    seed()


def call(request):
    """What a function returns."""
    return plain(named(request["function"])(*request["arguments"]))


def documents(request):
    """The rows that `process_docs` makes of a dataset."""
    function = named(request["function"])
    import datasets

    datasets.disable_progress_bars()
    return [plain(dict(row)) for row in function(datasets.Dataset.from_list(request["rows"]))]


def results(request):
    """What `process_results` returns for the answers to a row."""
    given = request["answers"]
    if request["are_pairs"]:
        given = [tuple(answer) for answer in given]
    made = named(request["function"])(request["row"], given)
    if not isinstance(made, dict):
        raise TypeError(f"returned a {type(made).__name__}, and a dict of figures is expected")
    return [[str(name), keep(value)] for name, value in made.items()]


def metric(request):
    """What a response is worth beside the right one, by a metric that is called as the harness calls it."""
    function, said, arguments = named(request["function"]), request["said"], request["arguments"]

    def score(right):
        try:
            return function(references=[right], predictions=[said], **arguments)
        except TypeError:
            return function([right, said])

    name = request["name"]
    if request["several"]:
        scores = [score(right) for right in request["right"]]
        scores = [found[name] if isinstance(found, dict) else found for found in scores]
        return [[name, keep(1.0 if any(scores) else 0.0)]]
    right = request["right"]
    if type(right) is not type(said) and not isinstance(said, list):
        right = type(said)(right)
    found = score(right)
    found = found if isinstance(found, dict) else {name: found}
    return [[str(name), keep(value)] for name, value in found.items()]


def aggregate(request):
    """The figure of values, kept ones among them."""

    def item(value):
        if isinstance(value, dict):
            return kept[value["kept"]]
        return tuple(value) if isinstance(value, list) else value

    made = named(request["function"])([item(value) for value in request["values"]])
    figure = number(made)
    if figure is None:
        raise TypeError(f"returned a {type(made).__name__}, and a number is expected")
    return figure


def filtered(request):
    """What a filter makes of the responses to all rows."""
    apply = named(request["function"])
    if request["arguments"] is not None:
        apply = apply(**request["arguments"]).apply
    return [plain(of_row) for of_row in apply(request["responses"], request["rows"])]


KINDS = {
    function.__name__: function
    for function in (versions, load, seeded, call, documents, results, metric, aggregate, filtered)
}


def told(error):
    """An error in a line, with the place in a module of the task."""
    traceback.print_exception(error)
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError):
        return f"{text}: install it into {sys.prefix}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in modules]
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


seed()
for line in requests:
    request = json.loads(line)
    for place in request["forget"]:
        kept.pop(place, None)
    try:
        answer = json.dumps({"value": KINDS[request["kind"]](request)}, ensure_ascii=False)
        # Half a character is none.
        answer.encode()
    except (Exception, SystemExit) as error:
        answer = json.dumps({"error": told(error)})
    answers.write(answer + "\n")
    answers.flush()
