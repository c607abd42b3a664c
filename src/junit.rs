//! Problems as JUnit XML, which CI servers show as tests: a suite per file, a failed case per error.

use std::fmt::Write;

use engine::file::problem::{Problem, Severity};
use engine::file::source::Sources;
use engine::visible::is_hidden;

/// One file, its problems and the texts that they are in.
pub(crate) struct Suite<'a> {
    /// As on the command line.
    pub file: &'a str,
    /// Whether the file passed every check.
    pub valid: bool,
    /// The texts.
    pub sources: &'a Sources,
    pub problems: &'a [Problem],
}

/// The report on several files.
pub(crate) fn report(suites: &[Suite<'_>]) -> String {
    let mut xml = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let failures: usize = suites.iter().map(Suite::failures).sum();
    let tests: usize = suites.iter().map(Suite::tests).sum();
    line(
        &mut xml,
        0,
        &format!("testsuites name=\"pipeline validate\" tests=\"{tests}\" failures=\"{failures}\" errors=\"0\""),
    );
    suites.iter().for_each(|suite| suite.write(&mut xml));
    line(&mut xml, 0, "/testsuites");
    xml
}

fn line(xml: &mut String, depth: usize, tag: &str) {
    writeln!(xml, "{}<{tag}>", "  ".repeat(depth)).expect("writing to a string cannot fail");
}

impl Suite<'_> {
    fn of(&self, severity: Severity) -> impl Iterator<Item = &Problem> {
        self.problems.iter().filter(move |problem| problem.severity == severity)
    }

    fn failures(&self) -> usize {
        self.of(Severity::Error).count()
    }

    /// A file without errors is one test that passed.
    fn tests(&self) -> usize {
        self.failures() + usize::from(self.valid)
    }

    fn write(&self, xml: &mut String) {
        let file = escaped(self.file);
        let (tests, failures) = (self.tests(), self.failures());
        line(
            xml,
            1,
            &format!("testsuite name=\"{file}\" tests=\"{tests}\" failures=\"{failures}\" errors=\"0\" skipped=\"0\""),
        );
        if self.valid {
            line(xml, 2, &format!("testcase name=\"valid\" classname=\"{file}\" file=\"{file}\"/"));
        }
        for problem in self.of(Severity::Error) {
            let (number, column) = self.sources.line_column(problem.span);
            let name = format!("{} at {number}:{column}", problem.code);
            line(xml, 2, &format!("testcase name=\"{name}\" classname=\"{file}\" file=\"{file}\" line=\"{number}\""));
            let message = escaped(&problem.message);
            let told = escaped(&self.told(problem));
            line(xml, 3, &format!("failure type=\"{}\" message=\"{message}\">{told}</failure", problem.code));
            line(xml, 2, "/testcase");
        }
        let warnings: Vec<String> = self.of(Severity::Warning).map(|problem| self.told(problem)).collect();
        if !warnings.is_empty() {
            line(xml, 2, &format!("system-out>{}</system-out", escaped(&warnings.join("\n"))));
        }
        line(xml, 1, "/testsuite");
    }

    /// A problem in a line of words, and its help in another.
    fn told(&self, problem: &Problem) -> String {
        let (number, column) = self.sources.line_column(problem.span);
        let severity = problem.severity.name();
        let name = self.sources.get(problem.span.source).map_or(self.file, |source| &source.name);
        let help = problem.help.as_ref().map(|help| format!("\nhelp: {help}")).unwrap_or_default();
        format!("{name}:{number}:{column}: {severity}[{}]: {}{help}", problem.code, problem.message)
    }
}

/// Text as it may be in XML 1.0, between quotes too: most control characters may not, in any spelling.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\n' => escaped.push_str("&#10;"),
            '\t' => escaped.push_str("&#9;"),
            '\r' => escaped.push_str("&#13;"),
            '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            // Some of them XML allows, and a terminal obeys.
            letter if is_hidden(letter) => escaped.push('\u{fffd}'),
            letter => escaped.push(letter),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::file::source::Span;

    #[test]
    fn each_error_is_a_failed_case_and_a_valid_file_one_that_passed() {
        let mut sources = Sources::default();
        let source = sources.add("a<b>.yaml", "x: \"\u{1}\"\n");
        let span = Span { source, offset: 3, len: 3 };
        let error = Problem::error("wrong-type", span, "\u{1} & \"x\"", "l").with_help("do\nthis");
        let warning = Problem::warning("no-effect", span, "w", "l");
        let problems = [error, warning];
        let wrong = Suite { file: "a<b>.yaml", valid: false, sources: &sources, problems: &problems };
        let fine = Suite { file: "b.yaml", valid: true, sources: &sources, problems: &problems[1..] };
        let expected = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>
<testsuites name=\"pipeline validate\" tests=\"2\" failures=\"1\" errors=\"0\">
  <testsuite name=\"a&lt;b&gt;.yaml\" tests=\"1\" failures=\"1\" errors=\"0\" skipped=\"0\">
    <testcase name=\"wrong-type at 1:4\" classname=\"a&lt;b&gt;.yaml\" file=\"a&lt;b&gt;.yaml\" line=\"1\">
      <failure type=\"wrong-type\" message=\"\u{fffd} &amp; &quot;x&quot;\">a&lt;b&gt;.yaml:1:4: error[wrong-type]: \u{fffd} &amp; &quot;x&quot;&#10;help: do&#10;this</failure>
    </testcase>
    <system-out>a&lt;b&gt;.yaml:1:4: warning[no-effect]: w</system-out>
  </testsuite>
  <testsuite name=\"b.yaml\" tests=\"1\" failures=\"0\" errors=\"0\" skipped=\"0\">
    <testcase name=\"valid\" classname=\"b.yaml\" file=\"b.yaml\"/>
    <system-out>a&lt;b&gt;.yaml:1:4: warning[no-effect]: w</system-out>
  </testsuite>
</testsuites>
";
        assert_eq!(report(&[wrong, fine]), expected);
    }
}
