//! Which `Host` headers are served.
//!
//! A page of another site can have a name of its own resolve to this machine (DNS rebinding); its browser then takes
//! this server for that site's. The name stays in `Host`.

use std::net::IpAddr;

/// Which `Host` headers are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostRule {
    /// Names of this machine for itself: `localhost` and loopback addresses.
    Loopback,
    /// All: the server is meant to be reached from elsewhere, by names that it does not know.
    Any,
}

impl HostRule {
    /// The rule for a server at an address.
    pub fn of(address: IpAddr) -> Self {
        if address.is_loopback() { Self::Loopback } else { Self::Any }
    }

    /// Whether a header, if there is one, is served.
    pub(crate) fn allows(self, host: Option<&str>) -> bool {
        match (self, host) {
            (Self::Any, _) => true,
            (Self::Loopback, None) => false,
            (Self::Loopback, Some(host)) => {
                let name = without_port(host);
                let address = name.trim_start_matches('[').trim_end_matches(']');
                name.eq_ignore_ascii_case("localhost")
                    || address.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
            }
        }
    }
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|digit| digit.is_ascii_digit()) && !name.ends_with(':') => name,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_other_sites_are_refused_on_loopback() {
        for host in ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:8000", "127.8.9.1"] {
            assert!(HostRule::Loopback.allows(Some(host)), "{host}");
        }
        for host in ["example.org", "localhost.example.org:8000", "10.0.0.1:8000", "", ":8000", "127.0.0.1.nip.io", "0"]
        {
            assert!(!HostRule::Loopback.allows(Some(host)), "{host}");
        }
        assert!(!HostRule::Loopback.allows(None));
        assert!(HostRule::Any.allows(None));
        assert_eq!(HostRule::of(IpAddr::from([0, 0, 0, 0])), HostRule::Any);
        assert_eq!(HostRule::of(IpAddr::from([127, 0, 0, 1])), HostRule::Loopback);
    }
}
