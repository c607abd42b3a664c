//! Whether a text by a grammar can come to where no token may follow.

use std::collections::{HashMap, HashSet};

use llguidance::api::ParserLimits;
use llguidance::earley::{CGrammar, CSymIdx};

/// Whether a rule of a grammar that a text can come to goes on, behind what can be written, with what cannot. The text
/// may have another way on: other alternatives with the same beginning are not considered. llguidance sees most values
/// that cannot be written, and not the names that `patternProperties` leaves, nor all numbers by `multipleOf`.
pub(super) fn has_dead_end(grammar: &CGrammar, limits: &ParserLimits) -> bool {
    let Some(written) = written_symbols(grammar, limits) else { return false };
    let (mut symbols, mut seen) = (vec![grammar.start()], HashSet::from([grammar.start()]));
    while let Some(symbol) = symbols.pop() {
        for rule in grammar.rules_of(symbol) {
            let (parts, ..) = grammar.rule_rhs(*rule);
            let stuck = parts.iter().position(|part| !written.contains(part));
            if stuck.is_some_and(|at| at > 0) {
                return true;
            }
            // What cannot be written whole may have a beginning that can.
            let begun = stuck.map_or(parts.len(), |at| at + 1);
            symbols.extend(parts[..begun].iter().filter(|part| seen.insert(**part)));
        }
    }
    !written.contains(&grammar.start())
}

/// The symbols of a grammar that can be written whole. None where its lexemes are beyond the limits.
fn written_symbols(grammar: &CGrammar, limits: &ParserLimits) -> Option<HashSet<CSymIdx>> {
    let lexemes = grammar.lexer_spec();
    // The parser has been made of them, within these limits.
    let mut lexer = lexemes.to_regex_vec(&mut limits.clone()).ok()?;
    let start = lexer.initial_state(&lexemes.all_lexemes());
    let with_text = &lexer.state_desc(start).possible;
    let (mut symbols, mut seen) = (vec![grammar.start()], HashSet::from([grammar.start()]));
    let mut rules: Vec<(CSymIdx, &[CSymIdx])> = Vec::new();
    while let Some(symbol) = symbols.pop() {
        for rule in grammar.rules_of(symbol) {
            let (parts, ..) = grammar.rule_rhs(*rule);
            symbols.extend(parts.iter().filter(|part| seen.insert(**part)));
            rules.push((symbol, parts));
        }
    }
    let mut users: HashMap<CSymIdx, Vec<usize>> = HashMap::new();
    for (rule, (_, parts)) in rules.iter().enumerate() {
        parts.iter().for_each(|part| users.entry(*part).or_default().push(rule));
    }
    let is_written = |symbol: &CSymIdx| {
        let symbol = grammar.sym_data(*symbol);
        symbol.is_nullable || symbol.lexeme.is_some_and(|lexeme| with_text.contains(lexeme))
    };
    let mut written: HashSet<CSymIdx> = seen.into_iter().filter(is_written).collect();
    let mut fresh: Vec<CSymIdx> = written.iter().copied().collect();
    let mut missing: Vec<usize> = rules.iter().map(|(_, parts)| parts.len()).collect();
    while let Some(part) = fresh.pop() {
        for rule in users.get(&part).into_iter().flatten() {
            missing[*rule] -= 1;
            let (symbol, _) = rules[*rule];
            if missing[*rule] == 0 && written.insert(symbol) {
                fresh.push(symbol);
            }
        }
    }
    Some(written)
}
