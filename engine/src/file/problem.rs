//! Problems: what is wrong with a pipeline file, where, and what to do.

use serde::Serialize;

use super::source::Span;

/// Whether a problem stops a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Nothing runs.
    Error,
    /// Said, and the run goes on.
    Warning,
}

impl Severity {
    /// As it is written for programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
        }
    }
}

/// One mistake, with its place in the text.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    /// A stable name, such as `unknown-key`.
    pub code: &'static str,
    /// Error or warning.
    pub severity: Severity,
    /// A lower-case fragment without a full stop.
    pub message: String,
    /// What to underline.
    pub span: Span,
    /// What is under the underline.
    pub label: String,
    /// What to do about it.
    pub help: Option<String>,
    /// Other places that belong to it, each with what is under its underline.
    pub related: Vec<(Span, String)>,
    /// The parameter that it is about, as a dotted path below `with:`, where its span is that of the whole mapping:
    /// the engine knows where each parameter stands, and a stage kind does not. Of a missing key it is that key.
    pub field: Option<String>,
}

impl Problem {
    pub fn error(code: &'static str, span: Span, message: impl Into<String>, label: impl Into<String>) -> Self {
        Self {
            code,
            severity: Severity::Error,
            message: message.into(),
            span,
            label: label.into(),
            help: None,
            related: Vec::new(),
            field: None,
        }
    }

    pub fn warning(code: &'static str, span: Span, message: impl Into<String>, label: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, ..Self::error(code, span, message, label) }
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn with_help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// Adds what to do about it, where something is known.
    #[must_use]
    pub fn with_help_if(mut self, help: Option<String>) -> Self {
        self.help = help.or(self.help);
        self
    }

    /// Says which parameter it is about, such as `lora.rank`.
    #[must_use]
    pub fn at(mut self, field: impl Into<String>) -> Self {
        self.field = Some(field.into());
        self
    }

    /// Moves it to the place of the parameter that it is about: itself, or the innermost that is written around it.
    #[must_use]
    pub(crate) fn placed(mut self, field_spans: &[(String, Span)]) -> Self {
        let Some(field) = self.field.take() else { return self };
        let mut path = field.as_str();
        loop {
            if let Some((_, span)) = field_spans.iter().find(|(known, _)| known == path) {
                self.span = *span;
                return self;
            }
            let Some(end) = path.rfind(['.', '[']) else { return self };
            path = &path[..end];
        }
    }

    /// Where it stands among others: they are told in the order of the text.
    pub fn place(&self) -> (u32, usize, usize) {
        (self.span.source.0, self.span.offset, self.span.len)
    }

    /// Whether both say the same of the same place, whatever else they add.
    pub fn says_the_same(&self, other: &Self) -> bool {
        (self.code, self.span, &self.message) == (other.code, other.span, &other.message)
    }

    /// Adds another place that belongs to it.
    #[must_use]
    pub fn with_related(mut self, span: Span, label: impl Into<String>) -> Self {
        self.related.push((span, label.into()));
        self
    }
}
