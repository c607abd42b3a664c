#!/usr/bin/env python3
"""Writes tests/export/schema.json: the parts of the published schemas of Argo and Kubernetes that `pipeline export` uses.

    pip install hera==7.1.0 kubernetes-validate==1.37.0 pyyaml
    PIPELINE_MANIFESTS=/tmp/manifests cargo test --release --test program export::
    python tests/reference/make_export_schema.py /tmp/manifests/*.yaml > tests/export/schema.json

hera's models are generated from Argo's OpenAPI document, the schemas in kubernetes-validate from that of Kubernetes. A definition is kept where the
manifests given use it; what they do not use of it may hold anything, but a name that it does not have is an error: Argo's own schema
lets every name pass.
"""
import json
import pathlib
import sys

import kubernetes_validate
import yaml
from hera.workflows import models

KUBERNETES = "v1.31.0-local-strict"


def plain(schema):
    """Without descriptions, and without the `null` that the models allow and the API does not need."""
    if isinstance(schema, list):
        return [plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in ("description", "title") and isinstance(value, str) or key == "default":
            continue
        kept[key] = {name: plain(of) for name, of in value.items()} if key == "properties" else plain(value)
    choices = [choice for choice in kept.get("anyOf", []) if choice != {"type": "null"}]
    if "anyOf" in kept and len(choices) == 1:
        del kept["anyOf"]
        kept.update(choices[0])
    return kept


def here(schema):
    """With references into this document."""
    if isinstance(schema, list):
        return [here(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: here(value) for key, value in schema.items() if not key.startswith("x-kubernetes")}
    if isinstance(moved.get("$ref"), str):
        moved["$ref"] = "#/$defs/" + moved["$ref"].rsplit("/", 1)[1]
    return moved


def definitions():
    workflow = here(plain(models.Workflow.model_json_schema(by_alias=True)))
    found = workflow.pop("$defs")
    folder = pathlib.Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / KUBERNETES
    document = json.loads((folder / "_definitions.json").read_text())
    found.update({name: here(plain(schema)) for name, schema in document["$defs"].items()})
    return found | {"Workflow": workflow, "Job": found["io.k8s.api.batch.v1.Job"], "ConfigMap": found["io.k8s.api.core.v1.ConfigMap"]}


class Used:
    def __init__(self, known):
        self.known, self.names = known, set()

    def walk(self, schema, value):
        reference = schema.get("$ref")
        if reference:
            name = reference.rsplit("/", 1)[1]
            self.names.add(name)
            return self.walk(self.known[name], value)
        for choice in schema.get("anyOf", []):
            self.walk(choice, value)
        if isinstance(value, dict):
            for key, inner in value.items():
                if key in schema.get("properties", {}):
                    self.walk(schema["properties"][key], inner)
                elif isinstance(schema.get("additionalProperties"), dict):
                    self.walk(schema["additionalProperties"], inner)
        elif isinstance(value, list):
            for inner in value:
                self.walk(schema.get("items", {}), inner)


def cut(schema, used):
    """What is not used may be anything."""
    if isinstance(schema, list):
        return [cut(item, used) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema and schema["$ref"].rsplit("/", 1)[1] not in used:
        return {}
    return {key: cut(value, used) for key, value in schema.items()}


def main(paths):
    known = definitions()
    used = Used(known)
    for path in paths:
        for document in yaml.safe_load_all(open(path)):
            used.names.add(document["kind"])
            used.walk(known[document["kind"]], document)
    kept = {}
    for name in sorted(used.names):
        kept[name] = cut(known[name], used.names)
        if "properties" in kept[name]:
            kept[name]["additionalProperties"] = False
    comment = "The parts of Argo's and Kubernetes' API that `pipeline export` uses: Apache-2.0, The Argo Authors, The Kubernetes Authors. "
    comment += f"Written by tests/reference/make_export_schema.py from hera 7.1.0 and kubernetes-validate 1.37.0 ({KUBERNETES})."
    print(json.dumps({"$comment": comment, "$defs": kept}, indent=1))


main(sys.argv[1:])
