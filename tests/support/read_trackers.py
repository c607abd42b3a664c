"""Reads runs back as their trackers' own packages do, for tests/program/track.rs: a run as JSON on standard output.

`wandb FILE`, `swanlab FILE`, `mlflow URI EXPERIMENT`, `mlflow-is-up URI`. Of W&B the messages are its own and the log is
read by the reader that SwanLab has for it, since W&B's is inside a compiled program. Written for wandb 0.31, swanlab
0.10, mlflow 3.17.
"""

import json
import sys
import urllib.request


def records(reader, path, message):
    reader.open(path)
    while (data := reader.scan()) is not None:
        record = message()
        record.ParseFromString(data)
        yield record


def wandb(path: str) -> dict:
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    run = {"figures": [], "results": {}, "finished": False}
    for at, record in enumerate(records(WBDataStoreReader(), path, Record)):
        assert record.num == at + 1, record
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run |= {"name": record.run.display_name, "project": record.run.project, "group": record.run.run_group}
            run["config"] = {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            items = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            assert items["_step"] == record.history.step.num
            run["figures"] += [(name, items["_step"], value) for name, value in items.items() if not name.startswith("_")]
        elif kind == "summary":
            run["results"] |= {item.nested_key[0]: json.loads(item.value_json) for item in record.summary.update}
        elif kind == "exit":
            run["finished"] = record.exit.exit_code == 0
        else:
            assert kind == "header" and at == 0, record
    return run


def swanlab(path: str) -> dict:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.proto.swanlab.run.v1.run_pb2 import RunState
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    run, columns = {"figures": [], "results": {}, "finished": False}, set()
    for record in records(DataStoreReader(), path, Record):
        kind = record.WhichOneof("record_type") if "record_type" in Record.DESCRIPTOR.oneofs_by_name else record.ListFields()[-1][0].name
        if kind == "start":
            run |= {"name": record.start.name, "project": record.start.project, "group": record.start.group}
        elif kind == "save":
            config = yaml.safe_load(open(record.save.source_path, encoding="utf-8"))
            run["config"] = {name: entry["value"] for name, entry in config.items()}
        elif kind == "column":
            columns.add(record.column.column_key)
        elif kind == "scalar":
            scalar = record.scalar
            assert scalar.key in columns, scalar
            run["figures"].append((scalar.key, scalar.step, scalar.value.number))
            run["results"][scalar.key] = scalar.value.number
        elif kind == "finish":
            run["finished"] = record.finish.state == RunState.RUN_STATE_FINISHED
    return run


def mlflow(uri: str, experiment: str) -> list:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    runs = []
    for run in found:
        history = [metric for name in run.data.metrics for metric in client.get_metric_history(run.info.run_id, name)]
        runs.append({
            "name": run.info.run_name,
            "status": run.info.status,
            "params": run.data.params,
            "tags": run.data.tags,
            "figures": [(metric.key, metric.step, metric.value) for metric in history if "/" in metric.key],
            "results": {metric.key: metric.value for metric in history if "/" not in metric.key},
        })
    return runs


def mlflow_is_up(uri: str) -> bool:
    try:
        return urllib.request.urlopen(uri + "/health", timeout=5).status == 200
    except OSError:
        return False


READERS = {"wandb": wandb, "swanlab": swanlab, "mlflow": mlflow, "mlflow-is-up": mlflow_is_up}

print(json.dumps(READERS[sys.argv[1]](*sys.argv[2:])))
