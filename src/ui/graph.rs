//! Where the stages of a run stand in a drawing of its graph: layers from top to bottom, few crossings.
//!
//! The method of Sugiyama, Tagawa and Toda (1981): layers by the longest path, an edge over several layers goes through
//! a place in each, places are ordered by the mean of their neighbours' places, down and up.

use std::collections::{BTreeMap, BTreeSet};

use engine::history::Recorded;
use serde::Serialize;

/// A node's size and the room between nodes, in pixels.
const HEIGHT: f64 = 44.0;
const GAP: f64 = 22.0;
const BETWEEN_LAYERS: f64 = 46.0;
const PER_LETTER: f64 = 7.6;
const NARROWEST: f64 = 96.0;
const WIDEST: f64 = 280.0;

/// Times that the layers are ordered, down and up.
const SWEEPS: usize = 6;

/// The drawing, in whole pixels. It is small, as a graph of a thousand stages is one answer: what follows from the rest
/// is left out.
#[derive(Debug, Serialize)]
pub(super) struct Drawing {
    width: i64,
    height: i64,
    /// The height of every node, and from the top of a layer to that of the next.
    node_height: i64,
    layer_height: i64,
    nodes: Vec<Node>,
    edges: Vec<Edge>,
}

/// A stage, or all children of a sweep.
#[derive(Debug, Serialize)]
struct Node {
    /// The stages that it stands for, by their places in the run.
    stages: Vec<usize>,
    /// Its left upper corner and its width.
    x: i64,
    y: i64,
    width: i64,
}

/// What one stage hands to another, or has it wait for, from the middle of one's lower border to that of the other's
/// upper border.
#[derive(Debug, Serialize)]
struct Edge {
    /// Nodes by their places in [`Drawing::nodes`].
    from: usize,
    to: usize,
    /// Where it passes each layer between them, across.
    via: Vec<i64>,
}

/// Lays out the graph of a run. Children of a sweep are one node, but for the sweeps in `open`.
pub(super) fn draw(recorded: &Recorded, open: &BTreeSet<String>) -> Drawing {
    let mut of_stage: BTreeMap<&str, usize> = BTreeMap::new();
    let mut members: Vec<Vec<usize>> = Vec::new();
    let mut widths: Vec<f64> = Vec::new();
    let mut known: BTreeMap<&str, usize> = BTreeMap::new();
    for (place, stage) in recorded.stages.iter().enumerate() {
        let summary = &stage.summary;
        let name = if open.contains(&summary.declared) { &summary.stage } else { &summary.declared };
        let node = *known.entry(name).or_insert(members.len());
        members.resize(members.len().max(node + 1), Vec::new());
        members[node].push(place);
        widths.resize(members.len(), 0.0);
        widths[node] = width_of(name, &summary.kind, members[node].len());
        of_stage.insert(&summary.stage, node);
    }
    let mut edges: BTreeSet<(usize, usize)> = BTreeSet::new();
    for stage in &recorded.stages {
        let to = of_stage[stage.summary.stage.as_str()];
        let before = stage.plan.inputs.iter().map(|input| &input.stage).chain(&stage.plan.needs);
        let from = before.filter_map(|before| of_stage.get(before.as_str()).copied());
        edges.extend(from.filter(|from| *from != to).map(|from| (from, to)));
    }
    let places = Layers::of(members.len(), &edges, &widths).places();
    let node = |(stages, ((centre, top), width)): (Vec<usize>, (&(f64, f64), f64))| Node {
        stages,
        x: pixel(centre - width / 2.0),
        y: pixel(*top),
        width: pixel(width),
    };
    let edge = |(&(from, to), path): (&(usize, usize), &Vec<f64>)| Edge {
        from,
        to,
        via: path[1..path.len() - 1].iter().map(|x| pixel(*x)).collect(),
    };
    Drawing {
        width: pixel(places.width),
        height: pixel(places.height),
        node_height: pixel(HEIGHT),
        layer_height: pixel(HEIGHT + BETWEEN_LAYERS),
        nodes: members.into_iter().zip(places.nodes.iter().zip(widths)).map(node).collect(),
        edges: places.edges.iter().map(edge).collect(),
    }
}

fn pixel(place: f64) -> i64 {
    place.round() as i64
}

/// Room for the name, with how many stages it stands for, and for the kind, with how long it took.
fn width_of(name: &str, kind: &str, stages: usize) -> f64 {
    const COUNT: usize = 5;
    const TOOK: usize = 9;
    let name = name.chars().count() + if stages > 1 { COUNT } else { 0 };
    (PER_LETTER * name.max(kind.chars().count() + TOOK) as f64 + 40.0).clamp(NARROWEST, WIDEST)
}

/// Something that takes a place in a layer: a node, or an edge that passes.
#[derive(Debug, Clone, Default)]
struct Slot {
    width: f64,
    above: Vec<usize>,
    below: Vec<usize>,
}

struct Layers {
    slots: Vec<Slot>,
    /// The slots of each layer, from left to right.
    layers: Vec<Vec<usize>>,
    /// The slots of each edge, from its first node to its last.
    paths: BTreeMap<(usize, usize), Vec<usize>>,
    nodes: usize,
}

/// Where everything stands.
struct Places {
    width: f64,
    height: f64,
    /// The middle of each node, across, and its upper border.
    nodes: Vec<(f64, f64)>,
    /// Where each edge stands in each layer from that of its first node to that of its last, across.
    edges: BTreeMap<(usize, usize), Vec<f64>>,
}

impl Layers {
    fn of(nodes: usize, edges: &BTreeSet<(usize, usize)>, widths: &[f64]) -> Self {
        let depth = depths(nodes, edges);
        let mut slots: Vec<Slot> = widths.iter().map(|width| Slot { width: *width, ..Slot::default() }).collect();
        let mut layers = vec![Vec::new(); depth.iter().max().map_or(0, |deepest| deepest + 1)];
        for (node, depth) in depth.iter().enumerate() {
            layers[*depth].push(node);
        }
        let mut paths = BTreeMap::new();
        for (from, to) in edges {
            let mut path = vec![*from];
            for layer in &mut layers[depth[*from] + 1..depth[*to]] {
                layer.push(slots.len());
                path.push(slots.len());
                slots.push(Slot { width: 8.0, ..Slot::default() });
            }
            path.push(*to);
            for pair in path.windows(2) {
                slots[pair[0]].below.push(pair[1]);
                slots[pair[1]].above.push(pair[0]);
            }
            paths.insert((*from, *to), path);
        }
        let mut layered = Self { slots, layers, paths, nodes };
        layered.order();
        layered
    }

    /// Orders each layer by where the neighbours of its slots stand.
    fn order(&mut self) {
        let mut at = vec![0.0; self.slots.len()];
        let number = |layer: &[usize], at: &mut [f64]| {
            layer.iter().enumerate().for_each(|(place, slot)| at[*slot] = place as f64);
        };
        self.layers.iter().for_each(|layer| number(layer, &mut at));
        for sweep in 0..SWEEPS {
            let down = sweep % 2 == 0;
            for step in 1..self.layers.len() {
                let layer = if down { step } else { self.layers.len() - 1 - step };
                let slots = &self.slots;
                let wish = |slot: &usize| {
                    let neighbours = if down { &slots[*slot].above } else { &slots[*slot].below };
                    if neighbours.is_empty() { at[*slot] } else { mean(neighbours.iter().map(|other| at[*other])) }
                };
                let mut wishes: Vec<(f64, usize)> = self.layers[layer].iter().map(|slot| (wish(slot), *slot)).collect();
                wishes.sort_by(|one, other| one.0.total_cmp(&other.0));
                self.layers[layer] = wishes.into_iter().map(|(_, slot)| slot).collect();
                number(&self.layers[layer], &mut at);
            }
        }
    }

    /// Gives each slot its place: as near below its neighbours as the others of its layer let it.
    fn places(&self) -> Places {
        let mut centre = vec![0.0; self.slots.len()];
        for sweep in 0..SWEEPS {
            let down = sweep % 2 == 0;
            for step in 0..self.layers.len() {
                let layer = &self.layers[if down { step } else { self.layers.len() - 1 - step }];
                let wish = |slot: usize| {
                    let neighbours = if down { &self.slots[slot].above } else { &self.slots[slot].below };
                    let own = if sweep == 0 { 0.0 } else { centre[slot] };
                    if neighbours.is_empty() { own } else { mean(neighbours.iter().map(|other| centre[*other])) }
                };
                let wishes: Vec<f64> = layer.iter().map(|slot| wish(*slot)).collect();
                for (slot, place) in layer.iter().zip(self.apart(layer, &wishes)) {
                    centre[*slot] = place;
                }
            }
        }
        let left = (0..self.slots.len()).map(|slot| centre[slot] - self.slots[slot].width / 2.0);
        let left = left.fold(f64::INFINITY, f64::min).min(f64::MAX) - GAP;
        let right = (0..self.slots.len()).map(|slot| centre[slot] + self.slots[slot].width / 2.0);
        let right = right.fold(f64::NEG_INFINITY, f64::max).max(left) + GAP;
        let mut top = vec![0.0; self.slots.len()];
        for (depth, layer) in self.layers.iter().enumerate() {
            layer.iter().for_each(|slot| top[*slot] = GAP + depth as f64 * (HEIGHT + BETWEEN_LAYERS));
        }
        let edges =
            self.paths.iter().map(|(edge, path)| (*edge, path.iter().map(|slot| centre[*slot] - left).collect()));
        Places {
            width: right - left,
            height: self.layers.len() as f64 * (HEIGHT + BETWEEN_LAYERS) - BETWEEN_LAYERS + 2.0 * GAP,
            nodes: (0..self.nodes).map(|node| (centre[node] - left, top[node])).collect(),
            edges: edges.collect(),
        }
    }

    /// The places nearest to those that are wished for at which nothing overlaps, in least squares: slots that would
    /// overlap form a block, which stands at the mean of their wishes.
    fn apart(&self, layer: &[usize], wishes: &[f64]) -> Vec<f64> {
        // A block: its first slot, how many, the sum of their wishes less their offsets within the block.
        let mut blocks: Vec<(usize, usize, f64)> = Vec::new();
        let mut offsets = vec![0.0; layer.len()];
        let mut offset = 0.0;
        for (at, slot) in layer.iter().enumerate() {
            if at > 0 {
                offset += (self.slots[layer[at - 1]].width + self.slots[*slot].width) / 2.0 + GAP;
            }
            offsets[at] = offset;
            blocks.push((at, 1, wishes[at] - offset));
            while let [.., before, last] = blocks.as_mut_slice()
                && before.2 / before.1 as f64 >= last.2 / last.1 as f64
            {
                *before = (before.0, before.1 + last.1, before.2 + last.2);
                blocks.pop();
            }
        }
        let mut places = vec![0.0; layer.len()];
        for (first, count, sum) in blocks {
            for at in first..first + count {
                places[at] = sum / count as f64 + offsets[at];
            }
        }
        places
    }
}

/// How many edges the longest way to each node has.
fn depths(nodes: usize, edges: &BTreeSet<(usize, usize)>) -> Vec<usize> {
    let mut below = vec![Vec::new(); nodes];
    let mut waits = vec![0; nodes];
    for (from, to) in edges {
        below[*from].push(*to);
        waits[*to] += 1;
    }
    let mut depth = vec![0; nodes];
    let mut ready: Vec<usize> = (0..nodes).filter(|node| waits[*node] == 0).collect();
    while let Some(node) = ready.pop() {
        for next in &below[node] {
            depth[*next] = depth[*next].max(depth[node] + 1);
            waits[*next] -= 1;
            if waits[*next] == 0 {
                ready.push(*next);
            }
        }
    }
    depth
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    sum / count
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(nodes: usize, edges: &[(usize, usize)]) -> Places {
        Layers::of(nodes, &edges.iter().copied().collect(), &vec![100.0; nodes]).places()
    }

    #[test]
    fn every_edge_goes_down_and_nothing_overlaps() {
        let mut edges = Vec::new();
        // A sweep of forty between two stages, and an edge past all of it.
        for child in 1..41 {
            edges.extend([(0, child), (child, 41)]);
        }
        edges.push((0, 42));
        edges.push((41, 42));
        let places = layers(43, &edges);
        for ((from, to), path) in &places.edges {
            let ((first, top), (last, bottom)) = (places.nodes[*from], places.nodes[*to]);
            assert_eq!((path[0], *path.last().unwrap()), (first, last));
            assert_eq!(bottom - top, (path.len() - 1) as f64 * (HEIGHT + BETWEEN_LAYERS), "{from} {to} {path:?}");
        }
        let mut middle: Vec<f64> = (1..41).map(|node| places.nodes[node].0).collect();
        middle.sort_by(f64::total_cmp);
        assert!(middle.windows(2).all(|pair| pair[1] - pair[0] >= 100.0 + GAP - 1e-6), "{middle:?}");
        assert!(places.nodes.iter().all(|(x, y)| *x >= 50.0 && *x <= places.width - 50.0 && *y <= places.height));
    }

    #[test]
    fn two_chains_do_not_cross() {
        // a → d and b → c, declared so that the order of declaration would cross them.
        let places = layers(4, &[(0, 3), (1, 2)]);
        let left = |one: usize, other: usize| places.nodes[one].0 < places.nodes[other].0;
        assert_eq!(left(0, 1), left(3, 2));
    }

    #[test]
    fn nothing_is_a_drawing_too() {
        assert_eq!(layers(0, &[]).edges.len(), 0);
        assert_eq!(layers(1, &[]).nodes.len(), 1);
    }
}
