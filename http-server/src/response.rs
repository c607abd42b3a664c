//! Responses: a body that is there, or events as they come.

use std::convert::Infallible;
use std::io::{self, Write};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use hyper::StatusCode;
use hyper::body::{Body, Frame};
use hyper::header::{
    CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER, VARY, WWW_AUTHENTICATE,
};

/// What is sent to a client.
pub struct Response {
    pub status: StatusCode,
    content_type: &'static str,
    headers: Vec<(HeaderName, HeaderValue)>,
    body: ResponseBody,
}

/// Where the events of a response come from. It is dropped when the client goes away.
pub trait EventSource: Send {
    /// The data of the next event, in one line or several; none at the end.
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<String>>;
}

impl Response {
    /// A body of JSON.
    pub fn json(status: StatusCode, body: impl Into<Bytes>) -> Self {
        Self::new(status, "application/json", body)
    }

    /// A body of some type.
    pub fn new(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Self {
        Self { status, content_type, headers: Vec::new(), body: ResponseBody::Whole(Some(body.into())) }
    }

    /// Server-sent events.
    pub fn events(source: Box<dyn EventSource>) -> Self {
        let headers = vec![(CACHE_CONTROL, HeaderValue::from_static("no-cache"))];
        // Events are UTF-8 in any case, but some clients take text without a charset for ISO-8859-1.
        let content_type = "text/event-stream; charset=utf-8";
        Self { status: StatusCode::OK, content_type, headers, body: ResponseBody::Events(source) }
    }

    /// That it may be tried again after so many seconds.
    #[must_use]
    pub fn retry_after(mut self, seconds: u32) -> Self {
        self.headers.push((RETRY_AFTER, HeaderValue::from(seconds)));
        self
    }

    /// That a bearer's token is wanted.
    #[must_use]
    pub fn wants_bearer(mut self) -> Self {
        self.headers.push((WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")));
        self
    }

    /// A header of the service's own; `name` is in lower case.
    #[must_use]
    pub fn with_header(mut self, name: &'static str, value: &'static str) -> Self {
        self.headers.push((HeaderName::from_static(name), HeaderValue::from_static(value)));
        self
    }

    /// The same by gzip, where that is less.
    pub(crate) fn compressed(mut self) -> Self {
        let ResponseBody::Whole(Some(body)) = &self.body else { return self };
        if let Some(smaller) = gzip(body).ok().filter(|smaller| smaller.len() < body.len()) {
            self.body = ResponseBody::Whole(Some(smaller.into()));
            self.headers.push((CONTENT_ENCODING, HeaderValue::from_static("gzip")));
            self.headers.push((VARY, HeaderValue::from_static("accept-encoding")));
        }
        self
    }

    pub(crate) fn into_hyper(self) -> hyper::Response<ResponseBody> {
        let mut response = hyper::Response::new(self.body);
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(self.content_type));
        headers.insert(hyper::header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        headers.extend(self.headers);
        response
    }
}

fn gzip(body: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(body)?;
    encoder.finish()
}

/// The body of a response, as hyper reads it.
pub(crate) enum ResponseBody {
    Whole(Option<Bytes>),
    Events(Box<dyn EventSource>),
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut *self {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Events(source) => {
                source.poll_next(context).map(|data| data.map(|data| Ok(Frame::data(event(&data).into()))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(None))
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        match self {
            Self::Whole(bytes) => hyper::body::SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Self::Events(_) => hyper::body::SizeHint::default(),
        }
    }
}

/// An event of some data: a line of it cannot end the event, whatever it holds.
fn event(data: &str) -> String {
    let mut event = String::with_capacity(data.len() + 8);
    for line in data.split(['\n', '\r']) {
        event.push_str("data: ");
        event.push_str(line);
        event.push('\n');
    }
    event.push('\n');
    event
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No events at all.
    struct Nothing;

    impl EventSource for Nothing {
        fn poll_next(&mut self, _: &mut Context<'_>) -> Poll<Option<String>> {
            Poll::Ready(None)
        }
    }

    #[test]
    fn events_say_that_they_are_utf_8() {
        let response = Response::events(Box::new(Nothing)).into_hyper();
        assert_eq!(response.headers()[CONTENT_TYPE], "text/event-stream; charset=utf-8");
    }

    #[test]
    fn no_data_ends_its_event() {
        assert_eq!(event("[DONE]"), "data: [DONE]\n\n");
        assert_eq!(event("a\n\nevent: b"), "data: a\ndata: \ndata: event: b\n\n");
    }
}
