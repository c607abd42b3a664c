//! Which cryptography `https://` connections use.

/// Names it for this process. Whoever makes a client calls this before; all but the first call do nothing.
pub fn provide_tls() {
    // An error says that it is named already.
    let _ = rustls::crypto::ring::default_provider().install_default();
}
