//! Proxies and certificates, as the environment names them: the same program again, with variables set, before a server
//! with a certificate that nobody trusts and behind a proxy.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use stages::hub::{Hub, Repository, RepositoryKind, Retry, Service};
use test_harness::{child, test};

use crate::support::{COMMIT, FaultyHub};

const TLS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tls");

/// Puts TLS before the stand-in Hub; the port.
fn serve_tls(hub: &FaultyHub) -> u16 {
    let certificates = vec![CertificateDer::from_pem_file(format!("{TLS}/server.pem")).unwrap()];
    let key = PrivateKeyDer::from_pem_file(format!("{TLS}/server.key")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = Arc::new(config.with_no_client_auth().with_single_cert(certificates, key).unwrap());
    let behind = hub.endpoint.strip_prefix("http://").unwrap().to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (config, behind) = (Arc::clone(&config), behind.clone());
            // A client that does not trust the certificate goes away.
            thread::spawn(move || drop(answer_tls(stream, config, &behind)));
        }
    });
    port
}

fn answer_tls(stream: TcpStream, config: Arc<ServerConfig>, behind: &str) -> std::io::Result<()> {
    let connection = ServerConnection::new(config).map_err(std::io::Error::other)?;
    let mut tls = StreamOwned::new(connection, stream);
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        tls.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let mut hub = TcpStream::connect(behind)?;
    hub.write_all(&head)?;
    let mut answer = Vec::new();
    hub.read_to_end(&mut answer)?;
    tls.write_all(&answer)?;
    tls.conn.send_close_notify();
    tls.flush()
}

/// A proxy that leads every CONNECT to one port of this machine and keeps its requests' heads.
fn serve_proxy(to: u16) -> (u16, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let heads = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&heads);
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let kept = Arc::clone(&kept);
            thread::spawn(move || drop(pass_on(stream, to, &kept)));
        }
    });
    (port, heads)
}

fn pass_on(mut client: TcpStream, to: u16, heads: &Mutex<Vec<String>>) -> std::io::Result<()> {
    let mut head = String::new();
    for line in BufReader::new(client.try_clone()?).lines() {
        let line = line?;
        if line.is_empty() {
            break;
        }
        head.push_str(&line);
        head.push('\n');
    }
    heads.lock().unwrap().push(head);
    let mut server = TcpStream::connect(("127.0.0.1", to))?;
    client.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n")?;
    let (mut back_from, mut back_to) = (server.try_clone()?, client.try_clone()?);
    thread::spawn(move || drop(std::io::copy(&mut back_from, &mut back_to)));
    std::io::copy(&mut client, &mut server).map(drop)
}

/// Asks the Hub that the environment names, and says what came of it. Run by the tests below, each with variables of
/// its own.
#[child]
fn ask() {
    let retry = Retry { attempts: 1, first_pause: Duration::ZERO, silence: Duration::from_secs(5) };
    let hub = Hub::from_environment(Service::HUGGING_FACE, None).unwrap().with_retry(retry);
    let repository = Repository::parse(RepositoryKind::Model, "owner/name").unwrap();
    match hub.resolve_revision(&repository, "main") {
        Ok(commit) => println!("answer: {commit}"),
        Err(error) => {
            let help = error.help().unwrap_or_default();
            let failure = engine::error::StageError::from(error);
            println!("failure: {failure}; {:?}; {help}", failure.source);
        }
    }
}

/// What [`ask`] says with these variables.
fn asked(variables: &[(&str, &str)]) -> String {
    let mut command = child("ask");
    for name in
        ["HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"]
    {
        command.env_remove(name).env_remove(name.to_ascii_lowercase());
    }
    let folder = tempfile::tempdir().unwrap();
    command.env_remove("HF_TOKEN").env("HF_HOME", folder.path()).envs(variables.iter().copied());
    let output = command.output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn a_certificate_of_ones_own_is_trusted_where_a_variable_names_it() {
    let hub = FaultyHub::serve(&[("config.json", b"{}")]);
    let endpoint = format!("https://127.0.0.1:{}", serve_tls(&hub));
    let authority = format!("{TLS}/ca.pem");
    let said = asked(&[("HF_ENDPOINT", &endpoint)]);
    assert!(said.contains("failure:") && said.contains("REQUESTS_CA_BUNDLE") && hub.requests().is_empty(), "{said}");
    for variable in ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"] {
        let said = asked(&[("HF_ENDPOINT", &endpoint), (variable, &authority)]);
        assert!(said.contains(&format!("answer: {COMMIT}")), "{variable}: {said}");
    }
    for wrong in ["/no/such/file.pem", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")] {
        let said = asked(&[("HF_ENDPOINT", &endpoint), ("REQUESTS_CA_BUNDLE", wrong)]);
        assert!(said.contains(&format!("the certificates in `{wrong}`")), "{said}");
    }
}

#[test]
fn a_proxy_is_asked_to_connect_and_its_password_is_said_nowhere() {
    let hub = FaultyHub::serve(&[("config.json", b"{}")]);
    let (proxy, heads) = serve_proxy(serve_tls(&hub));
    let address = format!("http://someone:sesame-4711@127.0.0.1:{proxy}");
    let authority = format!("{TLS}/ca.pem");
    let endpoint = ("HF_ENDPOINT", "https://hub.example");
    let said = asked(&[endpoint, ("HTTPS_PROXY", &address), ("SSL_CERT_FILE", &authority)]);
    assert!(said.contains(&format!("answer: {COMMIT}")), "{said}");
    let head = heads.lock().unwrap().remove(0);
    assert!(head.starts_with("CONNECT hub.example:443 "), "{head}");
    // `someone:sesame-4711` in base64.
    assert!(head.contains("c29tZW9uZTpzZXNhbWUtNDcxMQ=="), "{head}");

    // Not for hosts that are to be reached directly: the name of this one leads nowhere.
    let direct = [endpoint, ("HTTPS_PROXY", address.as_str()), ("NO_PROXY", ".example"), ("SSL_CERT_FILE", &authority)];
    let said = asked(&direct);
    assert!(said.contains("failure:") && heads.lock().unwrap().is_empty(), "{said}");
    // A proxy that is not there.
    let said =
        asked(&[endpoint, ("HTTPS_PROXY", "http://someone:sesame-4711@127.0.0.1:9"), ("SSL_CERT_FILE", &authority)]);
    assert!(said.contains("failure:") && !said.contains("sesame-4711"), "{said}");
}
