//! The readers, on well-formed and broken files.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::PathBuf;

use super::*;

struct Reading {
    folder: tempfile::TempDir,
}

impl Reading {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn file(&self, name: &str, bytes: &[u8]) -> SourceFile {
        let path = self.folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        SourceFile { format: Format::of(&path).unwrap(), path, name: name.to_owned() }
    }
}

fn read(file: &SourceFile, range: Range<u64>, sample_by: SampleBy) -> (Vec<Result<Record, BadRecord>>, u64) {
    let mut records = Vec::new();
    let seen = file
        .read(range, &[], sample_by, &mut |record| {
            records.push(record);
            Ok(())
        })
        .unwrap();
    (records, seen)
}

fn texts(file: &SourceFile, sample_by: SampleBy) -> Vec<(u64, String)> {
    let (records, _) = read(file, 0..u64::MAX, sample_by);
    let text = |record: Record| (record.number, record.fields["text"].as_str().unwrap().to_owned());
    records.into_iter().map(|record| text(record.unwrap())).collect()
}

#[test]
fn a_byte_order_mark_and_foreign_line_ends_are_no_part_of_a_row() {
    let reading = Reading::new();
    let lines = reading.file("a.jsonl", b"\xEF\xBB\xBF{\"text\":\"one\"}\r\n\r\n{\"text\":\"two\"}");
    assert_eq!(texts(&lines, SampleBy::Line), [(1, "one".to_owned()), (3, "two".to_owned())]);
    let array = reading.file("a.json", b"\xEF\xBB\xBF\r\n [{\"text\":\"one\"},\r\n{\"text\":\"two\"}]\r\n");
    assert_eq!(texts(&array, SampleBy::Line), [(1, "one".to_owned()), (2, "two".to_owned())]);
    let csv = reading.file("a.csv", b"\xEF\xBB\xBFtext,x\r\none,1\r\n\"t\"\"w\r\no\",2\r\n");
    assert_eq!(csv.columns().unwrap(), ["text", "x"]);
    assert_eq!(texts(&csv, SampleBy::Line), [(1, "one".to_owned()), (2, "t\"w\r\no".to_owned())]);
    let text = reading.file("a.txt", b"\xEF\xBB\xBFone\r\ntwo\r\n");
    assert_eq!(texts(&text, SampleBy::Line), [(1, "one".to_owned()), (2, "two".to_owned())]);
}

#[test]
fn text_is_taken_by_line_by_paragraph_or_whole() {
    let reading = Reading::new();
    let file = reading.file("a.txt", b"\none\ntwo\n\n\n  three\n \nfour");
    let samples = |sample_by| texts(&file, sample_by);
    let numbered = |pairs: &[(u64, &str)]| pairs.iter().map(|(n, text)| (*n, (*text).to_owned())).collect::<Vec<_>>();
    assert_eq!(samples(SampleBy::Line), numbered(&[(2, "one"), (3, "two"), (6, "  three"), (8, "four")]));
    assert_eq!(samples(SampleBy::Paragraph), numbered(&[(2, "one\ntwo"), (6, "  three"), (8, "four")]));
    assert_eq!(samples(SampleBy::Document), numbered(&[(2, "one\ntwo\n\n\n  three\n \nfour")]));
    assert_eq!(file.count(SampleBy::Paragraph).unwrap(), 3);
}

#[test]
fn a_line_that_is_no_row_is_told_by_its_number() {
    let reading = Reading::new();
    let file = reading.file("a.jsonl", b"{\"a\":1}\n{\"a\":\n\n[1]\n{\"a\":\"\xFF\"}\n7\n");
    let (records, seen) = read(&file, 0..u64::MAX, SampleBy::Line);
    assert_eq!(seen, 5);
    let bad: Vec<_> = records.into_iter().filter_map(Result::err).collect();
    assert_eq!(bad.iter().map(|bad| bad.number).collect::<Vec<_>>(), [2, 4, 5, 6]);
    assert!(bad[0].problem.contains("not JSON: EOF"), "{}", bad[0].problem);
    assert!(bad[1].problem.contains("a list"), "{}", bad[1].problem);
    assert!(bad[2].problem.contains("unicode"), "{}", bad[2].problem);
}

#[test]
fn bytes_that_are_no_utf8_are_told_by_their_line() {
    let reading = Reading::new();
    let file = reading.file("a.txt", b"one\ntwo\nth\xFFree\n");
    let (records, _) = read(&file, 0..u64::MAX, SampleBy::Document);
    assert_eq!(records, [Err(BadRecord { number: 3, problem: "it is not UTF-8".to_owned() })]);
}

#[test]
fn a_malformed_table_or_array_stops_the_reading() {
    let reading = Reading::new();
    let files = [
        reading.file("a.json", b"[{\"a\":1}, {\"a\""),
        reading.file("b.json", b"[{\"a\":1}] trailing"),
        reading.file("a.csv", b"a,b\n1,2\n1,2,3\n"),
        reading.file("b.csv", b"a,b\n1,\xFF\n"),
        reading.file("a.parquet", b"PAR1 not really"),
        reading.file("a.arrow", b"ARROW1 not really"),
        reading.file("utf16.csv", b"\xFF\xFEa\0,\0"),
    ];
    for file in &files {
        let error = file.read(0..u64::MAX, &[], SampleBy::Line, &mut |_| Ok(())).unwrap_err();
        assert!(error.message.contains(&file.name), "{}", error.message);
        assert_eq!(error.cause, Cause::BadData, "{}", file.name);
    }
}

#[test]
fn a_range_is_read_and_no_more_than_it() {
    let reading = Reading::new();
    let lines: String = (0..10).map(|n| format!("{{\"text\":\"{n}\"}}\n")).collect();
    let array = format!("[{}] and this is never read", lines.trim().replace('\n', ","));
    let csv: String = std::iter::once("text\n".to_owned()).chain((0..10).map(|n| format!("{n}\n"))).collect();
    let files: Vec<SourceFile> = [("a.jsonl", &lines), ("b.json", &lines), ("c.json", &array), ("d.csv", &csv)]
        .into_iter()
        .map(|(name, text)| reading.file(name, text.as_bytes()))
        .collect();
    for file in &files {
        let (records, seen) = read(file, 3..5, SampleBy::Line);
        let texts: Vec<_> = records.iter().map(|record| record.as_ref().unwrap().fields["text"].clone()).collect();
        assert_eq!((texts, seen), (vec!["3".into(), "4".into()], 5), "{}", file.name);
        if file.name != "c.json" {
            assert_eq!(read(file, 8..20, SampleBy::Line).1, 10, "{}", file.name);
            assert_eq!(file.count(SampleBy::Line).unwrap(), 10, "{}", file.name);
        }
    }
}

#[test]
fn the_sinks_failure_ends_the_reading() {
    let reading = Reading::new();
    let file = reading.file("a.json", b"[{\"a\":1},{\"a\":2},{\"a\":3}]");
    let mut calls = 0;
    let error = file.read(0..u64::MAX, &[], SampleBy::Line, &mut |_| {
        calls += 1;
        Err(StageError::bad_data("enough"))
    });
    assert_eq!((error.unwrap_err().message.as_str(), calls), ("enough", 1));
}

#[test]
fn a_missing_file_is_the_machines_affair() {
    let file = SourceFile { path: PathBuf::from("/nowhere/a.csv"), name: "a.csv".to_owned(), format: Format::Csv };
    assert_eq!(file.columns().unwrap_err().cause, Cause::Machine);
}
