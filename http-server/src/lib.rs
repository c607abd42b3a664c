//! A small HTTP/1.1 server: accepts connections, checks Host and token, keeps limits, streams server-sent events,
//! drains.
//!
//! What is answered, and in what form errors are, is a [`Service`]'s affair. It has no TLS and sends no CORS headers:
//! it is for programs on the same machine, or behind a proxy.

#![forbid(unsafe_code)]

mod host;
mod response;
mod server;
mod token;
mod write_timeout;

use std::future::Future;
use std::time::Duration;

pub use bytes::Bytes;
pub use host::HostRule;
pub use hyper::{Method, StatusCode};
pub use response::{EventSource, Response};
pub use server::serve;
pub use token::Token;

/// What a server allows.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Which `Host` headers are served.
    pub hosts: HostRule,
    /// What requests have to show, but for public paths.
    pub token: Option<Token>,
    /// Bytes of a request's body.
    pub body_bytes: usize,
    /// Connections at once; further ones wait to be accepted.
    pub connections: usize,
    /// How long a client may take for the head of a request, and idle between two.
    pub head_timeout: Duration,
    /// How long a client may take for a request's body.
    pub body_timeout: Duration,
    /// How long a client may take nothing of a response that is there to be taken.
    pub write_timeout: Duration,
    /// Whether bodies are compressed for clients that take gzip; never events, each of which goes out by itself.
    pub compress: bool,
}

/// A request whose body has arrived.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: Method,
    /// The path, without a query.
    pub path: String,
    /// The query, as it came.
    pub query: String,
    /// The `Content-Type`, without parameters.
    pub content_type: Option<String>,
    pub body: Bytes,
}

impl Request {
    /// The values that the query has under a name, decoded, in their order.
    pub fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = String> + 'a {
        form_urlencoded::parse(self.query.as_bytes())
            .filter(move |(known, _)| known == name)
            .map(|(_, value)| value.into_owned())
    }

    /// The first of them.
    pub fn value(&self, name: &str) -> Option<String> {
        self.values(name).next()
    }
}

/// Why a request never reaches the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Its `Host` is none of this server's: another site's page may have been led here.
    Host,
    /// It shows no token, or a wrong one.
    Token,
    /// Its body has more bytes than allowed.
    BodyTooLarge {
        /// The limit.
        bytes: usize,
    },
    /// Its body did not arrive in time.
    BodyTimeout,
    /// Its body ended early, or is not framed as HTTP has it.
    BadBody,
}

impl Refusal {
    /// The status of the response.
    pub fn status(self) -> StatusCode {
        match self {
            Self::Host | Self::BadBody => StatusCode::BAD_REQUEST,
            Self::Token => StatusCode::UNAUTHORIZED,
            Self::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
        }
    }
}

/// What answers requests.
pub trait Service: Send + Sync + 'static {
    /// Whether a path is served to those without a token.
    fn is_public(&self, path: &str) -> bool;

    /// Answers a request. The future is dropped when the client goes away.
    fn respond(&self, request: Request) -> impl Future<Output = Response> + Send;

    /// The response to a request that does not reach it.
    fn refuse(&self, refusal: Refusal) -> Response;
}
