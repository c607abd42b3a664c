//! The graph of a plan as text for other programs to draw.

use super::{Edge, Plan};

/// A language for graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GraphFormat {
    /// Mermaid, which Markdown pages draw.
    Mermaid,
    /// Graphviz.
    Dot,
}

/// The stages and what flows between them.
pub fn graph_text(plan: &Plan, format: GraphFormat) -> String {
    let stages = plan.stages.iter().enumerate();
    let edges = plan.graph.edge_indices().filter_map(|edge| {
        let (from, to) = plan.graph.edge_endpoints(edge)?;
        Some((plan.graph[from], plan.graph[to], &plan.graph[edge]))
    });
    let mut text = String::new();
    match format {
        GraphFormat::Mermaid => {
            text.push_str("flowchart TD\n");
            for (index, stage) in stages {
                text.push_str(&format!("    s{index}[\"{}<br/><i>{}</i>\"]\n", stage.id, stage.kind));
            }
            for (from, to, edge) in edges {
                text.push_str(&match edge {
                    Edge::Output(output) => format!("    s{from} -- {output} --> s{to}\n"),
                    Edge::Needs => format!("    s{from} -.-> s{to}\n"),
                });
            }
        }
        GraphFormat::Dot => {
            text.push_str("digraph pipeline {\n    node [shape=box];\n");
            for (index, stage) in stages {
                text.push_str(&format!("    s{index} [label=\"{}\\n{}\"];\n", stage.id, stage.kind));
            }
            for (from, to, edge) in edges {
                text.push_str(&match edge {
                    Edge::Output(output) => format!("    s{from} -> s{to} [label=\"{output}\"];\n"),
                    Edge::Needs => format!("    s{from} -> s{to} [style=dashed];\n"),
                });
            }
            text.push_str("}\n");
        }
    }
    text
}
