//! Rows of preferences against TRL's and torchtune's tokens: `tests/golden/preference/data.json`.

use std::path::PathBuf;

use serde_json::Value;

use super::groups::Groups;
use super::row::{Fate, RowEncoder};
use super::*;
use crate::data::artifact::{IGNORE_INDEX, Judged, Role, Row, Said, TokenRow};
use crate::kinds::dataset::judged;

/// Rows of which TRL's outcome is an accident, with the prompt that they have here.
const QUIRKS: [(&str, &str); 4] = [
    ("implicit prompt, identical", "abc"),
    ("implicit prompt, one begins the other", "The end"),
    ("implicit prompt, nothing in common, chosen ends with a space", ""),
    ("implicit prompt, empty rejected", ""),
];

fn golden() -> Value {
    let own = || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden"));
    let folder = std::env::var_os("PIPELINE_GOLDEN_DIR").map_or_else(own, PathBuf::from);
    serde_json::from_slice(&std::fs::read(folder.join("preference/data.json")).unwrap()).unwrap()
}

fn tokenizer(case: &Value) -> Tokenizer {
    let name = case["tokenizer"].as_str().unwrap_or("bytelevel");
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/data/tokenizers");
    Tokenizer::from_folder(&PathBuf::from(folder).join(name)).unwrap()
}

fn numbers(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|number| number.as_i64().unwrap()).collect()
}

fn row_of(fields: &Value) -> Judged {
    judged(fields.as_object().unwrap().clone()).unwrap()
}

/// Has rows encoded as TRL does, with other options if there are any.
struct AsTrl {
    tokenizer: Tokenizer,
    renderer: PromptRenderer,
    border: ResponseBorder,
    max_seq_len: Option<usize>,
}

impl AsTrl {
    fn new(case: &Value) -> Self {
        let tokenizer = tokenizer(case);
        // TRL reads special tokens that the data writes out as such, and one of the tokenizers begins no text for it.
        let add_bos = Some(case["tokenizer"] == "metaspace");
        let params = PromptParams { sanitize_control_tokens: Some(false), add_bos, ..PromptParams::default() };
        let renderer = PromptRenderer::new(&params, &RowsFacts::pairs(), &tokenizer).unwrap();
        let renderer = renderer.train_on(TrainOn::Response);
        Self { tokenizer, renderer, border: ResponseBorder::Joint, max_seq_len: None }
    }

    fn encode(&self, row: Judged) -> Option<TokenRow> {
        let encoder = RowEncoder {
            tokenizer: &self.tokenizer,
            renderer: &self.renderer,
            max_seq_len: self.max_seq_len,
            on_too_long: OnTooLong::Truncate,
            on_no_target: OnNoTarget::Drop,
            response_border: self.border,
        };
        match encoder.encode(&Row::Judged(Box::new(row))).unwrap().fate {
            Fate::Kept { mut rows, .. } => rows.pop(),
            Fate::TooLong | Fate::NoTarget { .. } => None,
        }
    }
}

/// Ids and labels of the documents of a row.
fn documents(row: &TokenRow) -> Vec<(Vec<i64>, Vec<i64>)> {
    let mut start = 0;
    let of_document = |length: &usize| {
        let range = start..start + length;
        start = range.end;
        let ids = row.input_ids[range.clone()].iter().map(|id| i64::from(*id)).collect();
        (ids, row.labels[range].iter().map(|label| i64::from(*label)).collect())
    };
    row.document_lengths.iter().map(of_document).collect()
}

fn expected(prompt: &[i64], response: &[i64]) -> (Vec<i64>, Vec<i64>) {
    let masked = vec![i64::from(IGNORE_INDEX); prompt.len()];
    ([prompt, response].concat(), [&masked, response].concat())
}

#[test]
fn pairs_are_trls_where_the_border_is_joint() {
    let golden = golden();
    let mut compared = 0;
    for case in golden["pairs"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let encoder = AsTrl::new(case);
        let row = row_of(&case["row"]);
        if let Some((_, prompt)) = QUIRKS.iter().find(|(quirk, _)| *quirk == name) {
            assert_eq!(row.prompt, Said::Text((*prompt).to_owned()), "{name}");
            assert!(case["error"].is_string() || case["note"].as_str().unwrap().starts_with("quirk"), "{name}");
            continue;
        }
        let (prompt, sides) = (numbers(&case["prompt_ids"]), ["chosen_ids", "rejected_ids"].map(|side| &case[side]));
        let responses = encoder.renderer.responses(&row, ResponseBorder::Joint, &encoder.tokenizer).unwrap();
        for (found, side) in responses.iter().zip(sides) {
            let (ids, labels) = expected(&prompt, &numbers(side));
            let found_ids: Vec<i64> = found.encoded.input_ids.iter().map(|id| i64::from(*id)).collect();
            let found_labels: Vec<i64> = found.encoded.labels.iter().map(|label| i64::from(*label)).collect();
            assert_eq!((found_ids, found_labels), (ids, labels), "{name} {}", case["tokenizer"]);
            compared += 1;
        }
    }
    println!("data.json: {compared} documents of pairs");
    assert!(compared >= 60, "{compared}");
}

#[test]
fn pairs_are_cut_as_trl_cuts_them() {
    let golden = golden();
    let mut compared = 0;
    for case in golden["truncation"].as_array().unwrap().iter().filter(|case| case["truncation_mode"] == "keep_start") {
        let same = |pair: &&Value| pair["name"] == case["name"] && pair["tokenizer"] == case["tokenizer"];
        let pair = golden["pairs"].as_array().unwrap().iter().find(same).unwrap();
        let encoder = AsTrl { max_seq_len: Some(case["max_length"].as_u64().unwrap() as usize), ..AsTrl::new(case) };
        let found = encoder.encode(row_of(&pair["row"])).map(|row| documents(&row));
        let of = |side: &str| (numbers(&case[format!("{side}_input_ids")]), numbers(&case[format!("{side}_labels")]));
        // What TRL keeps of a pair without a predicted token in one of its responses is left out here.
        let predicted = |(_, labels): &(Vec<i64>, Vec<i64>)| labels.iter().skip(1).any(|label| *label >= 0);
        let expected = (case["kept"] == true).then(|| vec![of("chosen"), of("rejected")]);
        let expected = expected.filter(|sides| sides.iter().all(predicted));
        assert_eq!(found, expected, "{} {} {}", case["name"], case["tokenizer"], case["max_length"]);
        compared += 1;
    }
    assert!(compared >= 20, "{compared}");
}

#[test]
fn a_mismatched_document_has_the_response_of_the_row_before() {
    let golden = golden();
    for case in golden["unpaired"].as_array().unwrap() {
        let encoder = AsTrl::new(case);
        let rows: Vec<Judged> = case["rows"].as_array().unwrap().iter().map(row_of).collect();
        let alone = |row: &Judged, chosen: bool| Judged {
            chosen: row.chosen.clone().filter(|_| chosen),
            rejected: row.rejected.clone().filter(|_| !chosen),
            ..row.clone()
        };
        let rows: Vec<Judged> = match rows[0].chosen.is_some() && rows[0].rejected.is_some() {
            true => [true, false].into_iter().flat_map(|side| rows.iter().map(move |row| alone(row, side))).collect(),
            false => rows,
        };
        let rows: Vec<TokenRow> = rows.into_iter().map(|row| encoder.encode(row).unwrap()).collect();
        let batch = case["batch"].as_u64().unwrap() as usize;
        let mut expected_rows = case["expected"].as_array().unwrap().iter();
        for rows in rows.chunks(batch) {
            let mut groups = Groups::after(rows.last(), Shape::Judged, None);
            for (row, wanted) in rows.iter().zip(&mut expected_rows) {
                let complete = groups.complete(row.clone());
                let role = if wanted["label"] == true { Role::Chosen } else { Role::Rejected };
                assert_eq!(complete.roles, [role, Role::Mismatched]);
                let prompt = numbers(&wanted["prompt_ids"]);
                let sides =
                    ["completion_ids", "KL_completion_ids"].map(|side| expected(&prompt, &numbers(&wanted[side])));
                assert_eq!(documents(&complete), sides, "{}", case["name"]);
            }
        }
        assert!(expected_rows.next().is_none());
    }
}

#[test]
fn every_assistant_turn_is_learned_as_in_torchtune_where_that_is_asked_for() {
    for case in golden()["all_assistant_turns"].as_array().unwrap() {
        let trl = AsTrl::new(case);
        let renderer = trl.renderer.clone().train_on(TrainOn::Assistant);
        let encoder = AsTrl { renderer, border: ResponseBorder::Segments, ..trl };
        let found = encoder.encode(row_of(&case["row"])).unwrap();
        let sides = ["chosen", "rejected"]
            .map(|side| (numbers(&case[format!("{side}_input_ids")]), numbers(&case[format!("{side}_labels")])));
        assert_eq!(documents(&found), sides, "{}", case["name"]);
        let of_responses = AsTrl { border: ResponseBorder::Segments, ..AsTrl::new(case) };
        let fewer = of_responses.encode(row_of(&case["row"])).unwrap();
        assert_eq!(fewer.input_ids, found.input_ids);
        assert!(fewer.target_tokens() <= found.target_tokens());
    }
}

/// What is trained is what is generated: the prompt of a question is that of both documents.
#[test]
fn prompt_and_response_are_encoded_apart_by_default() {
    for case in golden()["pairs"].as_array().unwrap() {
        let encoder = AsTrl { border: ResponseBorder::Segments, ..AsTrl::new(case) };
        let row = row_of(&case["row"]);
        let Some(found) = encoder.encode(row.clone()) else { continue };
        let row = Row::Judged(Box::new(row));
        let asked = encoder.renderer.question(&row, &encoder.tokenizer).unwrap().prompt;
        let asked = asked.encode(&encoder.tokenizer).unwrap().input_ids;
        let ends_with_user = !case["name"].as_str().unwrap().contains("ends with an assistant turn");
        for (ids, _) in documents(&found).iter().filter(|_| ends_with_user) {
            let begin: Vec<u32> = ids.iter().take(asked.len()).map(|id| *id as u32).collect();
            assert_eq!(begin, asked, "{}", case["name"]);
        }
    }
}
