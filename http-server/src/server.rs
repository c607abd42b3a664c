//! Accepts connections and reads requests, until it is asked to drain.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Body, Incoming};
use hyper::header::{ACCEPT_ENCODING, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

use super::response::ResponseBody;
use super::write_timeout::WriteTimeout;
use super::{Bytes, Refusal, Request, Service, Settings};

/// The delay before it accepts again after an error, such as too many open files.
const RETRY_ACCEPT: Duration = Duration::from_millis(50);

/// Bytes of a body that is too large which are read all the same.
const MOST_DRAINED: usize = 256 << 20;

/// Serves until `drain` is ready; then accepts no more, and ends when all responses are sent.
pub async fn serve<S: Service>(
    listener: TcpListener,
    service: Arc<S>,
    settings: Settings,
    drain: impl Future<Output = ()>,
) {
    let settings = Arc::new(settings);
    let places = Arc::new(Semaphore::new(settings.connections));
    let (stop, stopping) = watch::channel(false);
    let mut connections = JoinSet::new();
    let mut drain = pin!(drain);
    loop {
        let accepted = tokio::select! {
            () = &mut drain => break,
            Some(_) = connections.join_next() => continue,
            accepted = accept(&listener, &places) => accepted,
        };
        match accepted {
            Ok((stream, place)) => {
                let (service, settings) = (Arc::clone(&service), Arc::clone(&settings));
                connections.spawn(connection(stream, place, service, settings, stopping.clone()));
            }
            Err(_) => tokio::time::sleep(RETRY_ACCEPT).await,
        }
    }
    drop(listener);
    stop.send_replace(true);
    while connections.join_next().await.is_some() {}
}

async fn accept(listener: &TcpListener, places: &Arc<Semaphore>) -> io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let place = Arc::clone(places).acquire_owned().await.map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, place))
}

/// Serves a connection to its end. How it ends is the client's affair.
async fn connection<S: Service>(
    stream: TcpStream,
    _place: OwnedSemaphorePermit,
    service: Arc<S>,
    settings: Arc<Settings>,
    mut stopping: watch::Receiver<bool>,
) {
    // Each event goes out when it is there. Where the system refuses that, they are only later.
    let _ = stream.set_nodelay(true);
    let stream = TokioIo::new(WriteTimeout::new(stream, settings.write_timeout));
    let respond = service_fn(|request| {
        let (service, settings) = (Arc::clone(&service), Arc::clone(&settings));
        async move { Ok::<_, Infallible>(respond(request, &*service, &settings).await) }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(settings.head_timeout);
    let mut connection = pin!(builder.serve_connection(stream, respond));
    let ended = tokio::select! {
        ended = connection.as_mut() => Some(ended),
        _ = stopping.wait_for(|stopping| *stopping) => None,
    };
    if ended.is_none() {
        connection.as_mut().graceful_shutdown();
        let _ = connection.await;
    }
}

async fn respond<S: Service>(
    request: hyper::Request<Incoming>,
    service: &S,
    settings: &Settings,
) -> hyper::Response<ResponseBody> {
    let compressed = settings.compress && takes_gzip(request.headers());
    let response = match read(request, service, settings).await {
        Ok(request) => service.respond(request).await,
        Err(refusal) => service.refuse(refusal),
    };
    if compressed { response.compressed().into_hyper() } else { response.into_hyper() }
}

/// Checks a request and reads its body.
async fn read<S: Service>(
    request: hyper::Request<Incoming>,
    service: &S,
    settings: &Settings,
) -> Result<Request, Refusal> {
    let (head, mut body) = request.into_parts();
    if !hosts_are_allowed(&head, settings) {
        return Err(Refusal::Host);
    }
    let path = head.uri.path().to_owned();
    if let Some(token) = settings.token.as_ref().filter(|_| !service.is_public(&path)) {
        let shown = head.headers.get(AUTHORIZATION).map(|value| value.as_bytes());
        if !token.is_shown_by(shown) {
            return Err(Refusal::Token);
        }
    }
    let read = tokio::time::timeout(settings.body_timeout, whole(&mut body, settings.body_bytes));
    let read = read.await.map_err(|_| Refusal::BodyTimeout)?;
    if matches!(read, Err(Refusal::BodyTooLarge { .. })) {
        // Most clients look at no answer before they have sent everything, and would find a closed connection.
        tokio::spawn(tokio::time::timeout(settings.body_timeout, drain(body)));
    }
    let body = read?;
    let query = head.uri.query().unwrap_or_default().to_owned();
    Ok(Request { method: head.method, path, query, content_type: content_type(&head.headers), body })
}

/// Whether all names that a request calls this server by are allowed.
fn hosts_are_allowed(head: &hyper::http::request::Parts, settings: &Settings) -> bool {
    let mut named: Vec<Option<&str>> = head.headers.get_all(HOST).iter().map(|host| host.to_str().ok()).collect();
    named.extend(head.uri.authority().map(|authority| Some(authority.as_str())));
    if named.is_empty() {
        named.push(None);
    }
    named.into_iter().all(|host| settings.hosts.allows(host))
}

/// Whether a client names gzip among the codings that it takes, and not with a weight of 0.
fn takes_gzip(headers: &HeaderMap) -> bool {
    let named = headers.get_all(ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    named.flat_map(|value| value.split(',')).any(|coding| {
        let (name, parameters) = coding.split_once(';').unwrap_or((coding, ""));
        let weight = parameters.trim().strip_prefix("q=").map_or(Ok(1.0), str::parse::<f32>);
        name.trim().eq_ignore_ascii_case("gzip") && weight.is_ok_and(|weight| weight > 0.0)
    })
}

fn content_type(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    let essence = value.split(';').next().unwrap_or(value);
    Some(essence.trim().to_ascii_lowercase())
}

/// Reads what a client goes on sending, and forgets it.
async fn drain(mut body: Incoming) {
    let mut read = 0;
    while let Some(Ok(frame)) = body.frame().await {
        read += frame.data_ref().map_or(0, Bytes::len);
        if read > MOST_DRAINED {
            return;
        }
    }
}

async fn whole(body: &mut Incoming, limit: usize) -> Result<Bytes, Refusal> {
    let too_large = Refusal::BodyTooLarge { bytes: limit };
    if body.size_hint().lower() > limit as u64 {
        return Err(too_large);
    }
    match Limited::new(body, limit).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(too_large),
        Err(_) => Err(Refusal::BadBody),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, ErrorKind, Write};
    use std::net::SocketAddr;

    use hyper::StatusCode;
    use hyper::header::HeaderValue;
    use tokio::runtime::Runtime;

    use super::super::{HostRule, Response};
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    /// A service that answers all requests alike.
    struct Alike;

    impl Service for Alike {
        fn is_public(&self, _: &str) -> bool {
            true
        }

        async fn respond(&self, _: Request) -> Response {
            Response::json(StatusCode::OK, "{}")
        }

        fn refuse(&self, refusal: Refusal) -> Response {
            Response::json(refusal.status(), "{}")
        }
    }

    /// A server that takes bodies of 1 KiB, and what it runs on.
    fn start() -> (Runtime, SocketAddr) {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let settings = Settings {
            hosts: HostRule::Any,
            token: None,
            body_bytes: 1 << 10,
            connections: 4,
            head_timeout: MINUTE,
            body_timeout: MINUTE,
            write_timeout: MINUTE,
            compress: false,
        };
        runtime.spawn(serve(listener, Arc::new(Alike), settings, std::future::pending()));
        (runtime, address)
    }

    /// Sends a body in so many parts, and reads only then: the first line of the response.
    fn send_all(address: SocketAddr, framing: &str, part: &str, parts: usize, end: &str) -> io::Result<String> {
        let mut stream = std::net::TcpStream::connect(address)?;
        stream.set_read_timeout(Some(MINUTE))?;
        stream.set_write_timeout(Some(MINUTE))?;
        write!(stream, "POST / HTTP/1.1\r\nHost: localhost\r\n{framing}\r\n\r\n")?;
        for _ in 0..parts {
            stream.write_all(part.as_bytes())?;
        }
        stream.write_all(end.as_bytes())?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        Ok(line)
    }

    /// A part of 1 MiB.
    fn mebibyte() -> String {
        "x".repeat(1 << 20)
    }

    /// The same of a body of unknown length.
    fn chunk() -> String {
        format!("100000\r\n{}\r\n", mebibyte())
    }

    #[test]
    fn who_sends_all_of_a_large_body_before_reading_finds_the_refusal() {
        // More than the system holds of a connection that nobody reads.
        const PARTS: usize = 64;
        let (_runtime, address) = start();
        let length = format!("Content-Length: {}", PARTS << 20);
        let of_known_length = send_all(address, &length, &mebibyte(), PARTS, "");
        let of_chunks = send_all(address, "Transfer-Encoding: chunked", &chunk(), PARTS, "0\r\n\r\n");
        for line in [of_known_length, of_chunks] {
            let line = line.unwrap();
            assert!(line.starts_with("HTTP/1.1 413 "), "{line}");
        }
    }

    #[test]
    fn a_body_without_end_is_not_read_for_ever() {
        let (_runtime, address) = start();
        let error = send_all(address, "Transfer-Encoding: chunked", &chunk(), 1 << 10, "0\r\n\r\n").unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset), "{error}");
    }

    #[test]
    fn gzip_is_sent_to_those_that_take_it() {
        let takes = |value: &'static str| {
            takes_gzip(&HeaderMap::from_iter([(ACCEPT_ENCODING, HeaderValue::from_static(value))]))
        };
        assert!(takes("gzip") && takes("br, GZIP;q=0.5") && takes("deflate,gzip ; q=1"));
        assert!(!takes("") && !takes("br") && !takes("gzip;q=0") && !takes("xgzip") && !takes("gzip;q=often"));
        assert!(!takes_gzip(&HeaderMap::new()));
    }
}
