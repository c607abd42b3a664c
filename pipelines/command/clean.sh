#!/bin/sh
# Turns lines of `question | answer` into JSON lines, each once, and counts what it left out.
#   clean.sh FILE ROWS_FOLDER METRICS_FOLDER
set -eu

awk -F ' *[|] *' '
    function quoted(text) { gsub(/\\/, "\\\\", text); gsub(/"/, "\\\"", text); return "\"" text "\"" }
    /^#/ || NF != 2 { skipped++; next }
    seen[$0]++ { repeated++; next }
    { printf "{\"question\": %s, \"answer\": %s}\n", quoted($1), quoted($2) >rows; kept++ }
    END { printf "{\"kept\": %d, \"repeated\": %d, \"skipped\": %d}\n", kept, repeated, skipped >metrics }
' rows="$2/rows.jsonl" metrics="$3/metrics.json" "$1"

cat "$3/metrics.json"
