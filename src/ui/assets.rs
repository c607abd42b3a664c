//! The files of the page, as they are in `ui/`.

use http_server::{Response, StatusCode};

/// What a browser lets the page do: run and show what comes from here, and nothing else.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

/// Path, type and content of each.
const FILES: &[(&str, &str, &str)] = &[
    ("/", HTML, include_str!("../../ui/index.html")),
    ("/app.js", SCRIPT, include_str!("../../ui/app.js")),
    ("/api.js", SCRIPT, include_str!("../../ui/api.js")),
    ("/charts.js", SCRIPT, include_str!("../../ui/charts.js")),
    ("/graph.js", SCRIPT, include_str!("../../ui/graph.js")),
    ("/words.js", SCRIPT, include_str!("../../ui/words.js")),
    ("/run.js", SCRIPT, include_str!("../../ui/run.js")),
    ("/runs.js", SCRIPT, include_str!("../../ui/runs.js")),
    ("/lengths.js", SCRIPT, include_str!("../../ui/lengths.js")),
    ("/sweeps.js", SCRIPT, include_str!("../../ui/sweeps.js")),
    ("/machine.js", SCRIPT, include_str!("../../ui/machine.js")),
    ("/style.css", STYLE, include_str!("../../ui/style.css")),
    ("/vendor/preact.js", SCRIPT, include_str!("../../ui/vendor/preact.js")),
    ("/vendor/uplot.js", SCRIPT, include_str!("../../ui/vendor/uplot.js")),
    ("/vendor/uplot.css", STYLE, include_str!("../../ui/vendor/uplot.css")),
];

/// The file at a path.
pub(super) fn get(path: &str) -> Option<Response> {
    let (_, content_type, content) = FILES.iter().find(|(known, ..)| *known == path)?;
    Some(guarded(Response::new(StatusCode::OK, content_type, *content)))
}

/// Whether there is a file at a path.
pub(super) fn has(path: &str) -> bool {
    FILES.iter().any(|(known, ..)| *known == path)
}

/// With what keeps other sites from the page, and the page from other sites.
pub(super) fn guarded(response: Response) -> Response {
    response
        .with_header("content-security-policy", POLICY)
        .with_header("referrer-policy", "no-referrer")
        .with_header("cross-origin-resource-policy", "same-origin")
        .with_header("cache-control", "no-cache")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of all that a view loads, before compression.
    const MOST: usize = 300_000;

    #[test]
    fn the_page_is_small_and_asks_nobody_else() {
        let all: usize = FILES.iter().map(|(.., content)| content.len()).sum();
        assert!(all <= MOST, "{all}");
        for (path, _, content) in FILES.iter().filter(|(path, ..)| !path.starts_with("/vendor/")) {
            let foreign = content.match_indices("://").filter(|(at, _)| !content[..*at].ends_with("http"));
            assert_eq!(foreign.count(), 0, "{path}");
            assert!(!content.contains("innerHTML") && !content.contains("eval("), "{path}");
        }
    }
}
