//! Requests to one Hub: addresses, the token, what a refusal means, and when to try again.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use engine::protocol::Network;
use reqwest::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_RANGE, COOKIE, HeaderMap, HeaderValue, LINK, RANGE, RETRY_AFTER,
};
use reqwest::{Client, Response, StatusCode, Url};
use serde::de::DeserializeOwned;

use super::error::HubError;
use super::repository::Repository;
use super::service::Service;

/// The longest wait that a server may ask for.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Tries to reach a server that has not answered yet.
const FIRST_ATTEMPTS: u32 = 3;

/// The largest answer to a question, in bytes. A page of a listing has at most a thousand entries of some hundred
/// bytes; ModelScope lists a whole model at once.
const LARGEST_ANSWER: usize = 16 << 20;

/// How many times the longest silence an answer may take.
const SLOWEST_ANSWER: u32 = 10;

/// An access token; it is shown nowhere.
#[derive(Clone)]
pub struct Token(HeaderValue);

impl Token {
    /// A token, or nothing for a text that cannot be one.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        let mut header = HeaderValue::from_str(&format!("Bearer {text}")).ok()?;
        header.set_sensitive(true);
        (!text.is_empty()).then_some(Self(header))
    }

    pub(super) fn header(&self) -> HeaderValue {
        self.0.clone()
    }

    /// The same as a cookie of this name.
    pub(super) fn cookie(&self, name: &str) -> Option<HeaderValue> {
        let token = self.0.to_str().ok()?.strip_prefix("Bearer ")?;
        let mut cookie = HeaderValue::from_str(&format!("{name}={token}")).ok()?;
        cookie.set_sensitive(true);
        Some(cookie)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// How patient a client is.
#[derive(Debug, Clone, Copy)]
pub struct Retry {
    /// How many tries in a row may fail without a byte gained.
    pub attempts: u32,
    /// The pause after the first failure; it doubles with each further one.
    pub first_pause: Duration,
    /// How long a server may be silent before the connection counts as cut.
    pub silence: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self { attempts: 6, first_pause: Duration::from_millis(500), silence: Duration::from_secs(30) }
    }
}

/// An HTTP client and the server it talks to. It lives within one runtime.
pub(super) struct Connection {
    client: Client,
    endpoint: Url,
    authorization: Option<HeaderValue>,
    cookie: Option<HeaderValue>,
    retry: Retry,
    network: Network,
    /// Whether there was any answer yet.
    answered: AtomicBool,
}

/// An answer.
#[derive(Debug)]
pub(super) struct Page<T> {
    /// What it says.
    pub(super) value: T,
    /// The query of the page that follows it.
    pub(super) next: Option<String>,
    /// Its length.
    pub(super) bytes: usize,
}

/// What a request is for: decides what a refusal means.
#[derive(Debug, Clone, Copy)]
pub(super) enum Subject<'a> {
    /// A branch, tag or commit.
    Revision(&'a str),
    /// The files at a commit.
    Listing(&'a str),
    /// A file at a commit.
    File { commit: &'a str, path: &'a str },
}

impl Connection {
    pub(super) fn new(
        service: Service,
        endpoint: &Url,
        token: Option<&Token>,
        retry: Retry,
        network: Network,
    ) -> Result<Self, HubError> {
        cache::remote::provide_tls();
        let mut builder = Client::builder()
            .user_agent(concat!("pipeline/", env!("CARGO_PKG_VERSION")))
            .referer(false)
            .connect_timeout(retry.silence)
            .read_timeout(retry.silence);
        if is_loopback(endpoint) {
            // A server on this machine is never behind the proxy that the environment names.
            builder = builder.no_proxy();
        }
        let client = builder.tls_certs_merge(certificates()?).build().map_err(HubError::Client)?;
        let cookie = token.and_then(|token| service.api().cookie(token));
        Ok(Self {
            client,
            endpoint: endpoint.clone(),
            authorization: token.map(Token::header),
            cookie,
            retry,
            network,
            answered: AtomicBool::new(false),
        })
    }

    /// `endpoint/segments…`, each segment escaped.
    pub(super) fn url<'a>(&self, segments: impl IntoIterator<Item = &'a str>) -> Url {
        let mut url = self.endpoint.clone();
        url.path_segments_mut().expect("an endpoint is an http address").pop_if_empty().extend(segments);
        url
    }

    /// A JSON answer and the query of its next page, after retries.
    pub(super) async fn json<T: DeserializeOwned>(
        &self,
        url: &Url,
        repository: &Repository,
        subject: Subject<'_>,
    ) -> Result<Page<T>, HubError> {
        let mut failures = 0;
        let (body, next) = loop {
            match self.body(url, repository, subject).await {
                Ok(answer) => break answer,
                Err(error) => self.pause_or_give_up(error, &mut failures).await?,
            }
        };
        let problem =
            |error: serde_json::Error| HubError::BadAnswer { what: repository.written(), problem: error.to_string() };
        Ok(Page { value: serde_json::from_slice(&body).map_err(problem)?, next, bytes: body.len() })
    }

    async fn body(
        &self,
        url: &Url,
        repository: &Repository,
        subject: Subject<'_>,
    ) -> Result<(Vec<u8>, Option<String>), HubError> {
        let mut response = self.get(url.clone(), None, repository, subject).await?;
        let next = response.headers().get(LINK).and_then(|link| super::listing::next_page(link.to_str().ok()?));
        let too_much = || HubError::BadAnswer {
            what: repository.written(),
            problem: format!("an answer of more than {} MiB", LARGEST_ANSWER >> 20),
        };
        let said = response.content_length().unwrap_or(0);
        if said > LARGEST_ANSWER as u64 {
            return Err(too_much());
        }
        let mut body = Vec::new();
        let begin = Instant::now();
        while let Some(bytes) = response.chunk().await.map_err(|source| self.unreachable(source))? {
            if body.len() + bytes.len() > LARGEST_ANSWER {
                return Err(too_much());
            }
            body.extend_from_slice(&bytes);
            // A server that says a byte now and then is never silent.
            if begin.elapsed() > self.retry.silence * SLOWEST_ANSWER {
                let problem = format!("an answer that is not whole after {} seconds", begin.elapsed().as_secs());
                return Err(HubError::BadAnswer { what: repository.written(), problem });
            }
        }
        Ok((body, next))
    }

    /// One request, from byte `from` where that is given. Statuses other than success are errors.
    ///
    /// Redirects are followed; reqwest drops the token where they lead to another host, port or scheme.
    pub(super) async fn get(
        &self,
        url: Url,
        from: Option<u64>,
        repository: &Repository,
        subject: Subject<'_>,
    ) -> Result<Response, HubError> {
        self.send(url, from.map(|from| format!("bytes={from}-")), repository, subject).await
    }

    /// As [`Connection::get`], for these bytes alone.
    pub(super) async fn get_part(
        &self,
        url: Url,
        bytes: &Range<u64>,
        repository: &Repository,
        subject: Subject<'_>,
    ) -> Result<Response, HubError> {
        let last = bytes.end.saturating_sub(1);
        self.send(url, Some(format!("bytes={}-{last}", bytes.start)), repository, subject).await
    }

    async fn send(
        &self,
        url: Url,
        range: Option<String>,
        repository: &Repository,
        subject: Subject<'_>,
    ) -> Result<Response, HubError> {
        if self.network == Network::Offline {
            let name = repository.written();
            let what = match subject {
                Subject::Revision(revision) => format!("what revision `{revision}` of `{name}` is"),
                Subject::Listing(_) => format!("which files `{name}` has"),
                Subject::File { path, .. } => format!("`{path}` of `{name}`"),
            };
            return Err(HubError::Offline { what });
        }
        // Ranges and lengths are those of the file only as long as nobody compresses it on the way.
        let mut request = self.client.get(url).header(ACCEPT_ENCODING, "identity");
        if let Some(range) = range {
            request = request.header(RANGE, range);
        }
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization.clone());
        }
        if let Some(cookie) = &self.cookie {
            request = request.header(COOKIE, cookie.clone());
        }
        let response = request.send().await.map_err(|source| self.unreachable(source))?;
        self.answered.store(true, Ordering::Relaxed);
        if response.status().is_success() {
            return Ok(response);
        }
        Err(self.refusal(response.status(), response.headers(), repository, subject))
    }

    /// Waits before the next try, or gives the error back where another try is of no use.
    pub(super) async fn pause_or_give_up(&self, error: HubError, failures: &mut u32) -> Result<(), HubError> {
        *failures += 1;
        // A connection that never came about is a machine without a network far more often than a bad moment.
        let nobody_is_there = error.is_of_connecting() && !self.answered.load(Ordering::Relaxed);
        let attempts = if nobody_is_there { self.retry.attempts.min(FIRST_ATTEMPTS) } else { self.retry.attempts };
        if !error.is_transient() || *failures >= attempts {
            return Err(error);
        }
        let backoff = self.retry.first_pause * 2_u32.pow((*failures - 1).min(16));
        let asked = match error {
            HubError::Status { retry_after_seconds: Some(seconds), .. } => Duration::from_secs(seconds),
            _ => Duration::ZERO,
        };
        let pause = backoff.max(asked).min(LONGEST_PAUSE);
        tracing::debug!(%error, ?pause, "trying again");
        tokio::time::sleep(pause).await;
        Ok(())
    }

    fn unreachable(&self, source: reqwest::Error) -> HubError {
        if source.is_redirect() {
            return HubError::Redirects { endpoint: self.endpoint_text() };
        }
        // An address may be signed, and then it is as good as a token.
        HubError::Unreachable { endpoint: self.endpoint_text(), source: source.without_url() }
    }

    fn endpoint_text(&self) -> String {
        let mut shown = self.endpoint.clone();
        // Both fail only for addresses that cannot have a user, and then there is nothing to hide.
        let _ = shown.set_username("");
        let _ = shown.set_password(None);
        shown.as_str().trim_end_matches('/').to_owned()
    }

    fn refusal(
        &self,
        status: StatusCode,
        headers: &HeaderMap,
        repository: &Repository,
        subject: Subject<'_>,
    ) -> HubError {
        let name = repository.written();
        let with_token = self.authorization.is_some();
        let repository_not_found = || HubError::RepositoryNotFound {
            endpoint: self.endpoint_text(),
            kind: repository.kind(),
            name: name.clone(),
            with_token,
        };
        let code = headers.get("x-error-code").and_then(|code| code.to_str().ok());
        match (status.as_u16(), code) {
            (401 | 403, Some("GatedRepo")) => HubError::Gated { page: self.page(repository), name, with_token },
            (_, Some("RepoNotFound")) => repository_not_found(),
            // For a name that does not exist the Hub asks a visitor without a token to log in.
            (401, None) if !with_token && matches!(subject, Subject::Revision(_)) => repository_not_found(),
            (401 | 403, _) => HubError::Refused { what: name, status: status.as_u16(), with_token },
            (404, Some("RevisionNotFound")) => {
                let revision = match subject {
                    Subject::Revision(revision) => revision,
                    Subject::Listing(commit) | Subject::File { commit, .. } => commit,
                };
                HubError::RevisionNotFound { name, revision: revision.to_owned() }
            }
            (404, _) => match subject {
                Subject::File { commit, path } => {
                    HubError::FileNotFound { name, commit: commit.to_owned(), path: path.to_owned() }
                }
                Subject::Revision(_) | Subject::Listing(_) => repository_not_found(),
            },
            (status, _) => {
                let what = match subject {
                    Subject::File { path, .. } => format!("{name}/{path}"),
                    Subject::Revision(_) | Subject::Listing(_) => name,
                };
                let asked = headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok());
                let seconds = asked.and_then(|value| seconds_until(value, SystemTime::now()));
                HubError::Status { what, status, retry_after_seconds: seconds }
            }
        }
    }

    /// The repository's page for people.
    fn page(&self, repository: &Repository) -> String {
        let folder = repository.service().api().page_folder(repository.kind());
        format!("{}/{folder}{}", self.endpoint_text(), repository.name())
    }
}

/// The first byte and the full length that a `Content-Range` names: `bytes 100-199/200`.
pub(super) fn content_range(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let (range, total) = headers.get(CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, total.parse().ok()))
}

/// What a `Retry-After` asks for: seconds, or the time until a date.
fn seconds_until(value: &str, now: SystemTime) -> Option<u64> {
    let value = value.trim();
    if let Ok(seconds) = value.parse() {
        return Some(seconds);
    }
    let date = httpdate::parse_http_date(value).ok()?;
    // One that has passed asks for no wait.
    let wait = date.duration_since(now).unwrap_or_default();
    Some(wait.as_secs() + u64::from(wait.subsec_nanos() > 0))
}

/// Certificates that are trusted besides the machine's, from the file that `REQUESTS_CA_BUNDLE` names, as Python's
/// tools know it. (`SSL_CERT_FILE` and `SSL_CERT_DIR` take the place of the machine's; the TLS library reads them
/// itself.)
fn certificates() -> Result<Vec<reqwest::Certificate>, HubError> {
    let Some(path) = std::env::var_os("REQUESTS_CA_BUNDLE").filter(|path| !path.is_empty()) else {
        return Ok(Vec::new());
    };
    let bad = |problem: String| HubError::BadCertificates { path: path.to_string_lossy().into_owned(), problem };
    let text = std::fs::read(&path).map_err(|error| bad(error.to_string()))?;
    let certificates = reqwest::Certificate::from_pem_bundle(&text).map_err(|error| bad(error.to_string()))?;
    if certificates.is_empty() { Err(bad("it holds none".to_owned())) } else { Ok(certificates) }
}

fn is_loopback(url: &Url) -> bool {
    matches!(url.host_str(), Some("127.0.0.1" | "localhost" | "[::1]"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_asks_to_wait_for_seconds_or_until_a_date() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        let asked = |value: &str| seconds_until(value, now);
        assert_eq!(asked("120"), Some(120));
        assert_eq!(asked("Sun, 06 Nov 1994 08:50:37 GMT"), Some(60));
        assert_eq!(asked("Sun, 06 Nov 1994 08:49:00 GMT"), Some(0));
        assert_eq!(seconds_until("Sun, 06 Nov 1994 08:49:39 GMT", now + Duration::from_millis(1)), Some(2));
        assert_eq!(asked("later"), None);
    }
}
