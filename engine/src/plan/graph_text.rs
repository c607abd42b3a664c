//! The graph of a plan as text for other programs to draw.

use std::collections::HashMap;

use super::{LeftOut, Plan, PlannedStage};

/// A language for graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GraphFormat {
    /// Mermaid, which Markdown pages draw.
    Mermaid,
    /// Graphviz.
    Dot,
}

/// The stages and what flows between them; the children of a sweep stand together.
pub fn graph_text(plan: &Plan, format: GraphFormat) -> String {
    let edges = edges(plan);
    let mut text = String::new();
    match format {
        GraphFormat::Mermaid => {
            text.push_str("flowchart TD\n");
            for group in groups(plan) {
                text.push_str(&mermaid(plan, &group));
            }
            for (from, to, edge) in edges {
                text.push_str(&match edge {
                    Some(output) => format!("    s{from} -- {output} --> s{to}\n"),
                    None => format!("    s{from} -.-> s{to}\n"),
                });
            }
            for LeftOut { stage, .. } in &plan.left_out {
                text.push_str(&format!("    %% left out: {stage}\n"));
            }
        }
        GraphFormat::Dot => {
            text.push_str("digraph pipeline {\n    node [shape=box];\n");
            for group in groups(plan) {
                text.push_str(&dot(plan, &group));
            }
            for (from, to, edge) in edges {
                text.push_str(&match edge {
                    Some(output) => format!("    s{from} -> s{to} [label=\"{output}\"];\n"),
                    None => format!("    s{from} -> s{to} [style=dashed];\n"),
                });
            }
            for LeftOut { stage, .. } in &plan.left_out {
                text.push_str(&format!("    // left out: {stage}\n"));
            }
            text.push_str("}\n");
        }
    }
    text
}

/// From which stage to which, by positions, each reason to wait once: an output that is read, or `needs:`.
pub(super) fn edges(plan: &Plan) -> Vec<(usize, usize, Option<&str>)> {
    let mut edges = Vec::new();
    for (to, stage) in plan.stages.iter().enumerate() {
        let first = edges.len();
        let reads = stage.inputs.iter().map(|input| (input.position, to, Some(input.output.as_str())));
        for edge in reads.chain(stage.needs.iter().map(|from| (*from, to, None))) {
            // Two fields may hold the same output.
            if !edges[first..].contains(&edge) {
                edges.push(edge);
            }
        }
    }
    edges
}

/// A stage, or the children of one.
struct Subgraph<'a> {
    declared: &'a str,
    /// Their places in the plan.
    stages: Vec<usize>,
}

fn groups(plan: &Plan) -> Vec<Subgraph<'_>> {
    let mut groups: Vec<Subgraph<'_>> = Vec::new();
    let mut known: HashMap<&str, usize> = HashMap::new();
    for (place, stage) in plan.stages.iter().enumerate() {
        let group = *known.entry(&stage.declared).or_insert_with(|| {
            groups.push(Subgraph { declared: &stage.declared, stages: Vec::new() });
            groups.len() - 1
        });
        groups[group].stages.push(place);
    }
    groups
}

/// What tells a child from the others.
fn values(stage: &PlannedStage) -> String {
    let values = stage.id.strip_prefix(&stage.declared).unwrap_or(&stage.id);
    values.trim_start_matches('[').trim_end_matches(']').replace('\\', "\\\\").replace('"', "'")
}

fn mermaid(plan: &Plan, group: &Subgraph<'_>) -> String {
    let first = group.stages[0];
    let stage = &plan.stages[first];
    let title = format!("{}<br/><i>{}</i>", group.declared, stage.kind);
    if stage.axes.is_empty() {
        return format!("    s{first}[\"{title}\"]\n");
    }
    let of_child = |place: &usize| format!("        s{place}[\"{}\"]\n", values(&plan.stages[*place]));
    let children: String = group.stages.iter().map(of_child).collect();
    format!("    subgraph g{first} [\"{title}\"]\n{children}    end\n")
}

fn dot(plan: &Plan, group: &Subgraph<'_>) -> String {
    let first = group.stages[0];
    let stage = &plan.stages[first];
    let title = format!("{}\\n{}", group.declared, stage.kind);
    if stage.axes.is_empty() {
        return format!("    s{first} [label=\"{title}\"];\n");
    }
    let of_child = |place: &usize| format!("        s{place} [label=\"{}\"];\n", values(&plan.stages[*place]));
    let children: String = group.stages.iter().map(of_child).collect();
    format!("    subgraph cluster_{first} {{\n        label=\"{title}\";\n{children}    }}\n")
}
