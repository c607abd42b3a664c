//! From an address to a client of the service; credentials come from the environment alone.

use std::fs;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path as Prefix;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, RetryConfig};

use super::RemoteError;
use super::place::{Location, RemotePlace, Service};
use super::tls::provide_tls;

/// How long a whole request may take: a part of a large file over a slow line.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(300);

/// How long a server may be silent.
const SILENCE: Duration = Duration::from_secs(30);

/// How long a connection may take to come about.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Variables of the environment, by name.
pub(super) type Variables = Vec<(String, String)>;

/// A client, and the prefix below which everything lies.
pub(super) fn connect(
    place: &RemotePlace,
    variables: &Variables,
) -> Result<(Arc<dyn ObjectStore>, Prefix), RemoteError> {
    let unusable =
        |error: object_store::Error| RemoteError::Settings { remote: place.to_string(), reason: error.to_string() };
    match &place.location {
        Location::Folder(folder) => {
            // A share that is not mounted must not be taken for an empty one.
            fs::read_dir(folder).map_err(|error| RemoteError::of_folder(place.to_string(), &error))?;
            let local = LocalFileSystem::new_with_prefix(folder).map_err(unusable)?.with_fsync(true);
            Ok((Arc::new(local), Prefix::default()))
        }
        Location::Bucket { service, bucket, prefix } => {
            provide_tls();
            let store = match service {
                Service::S3 => s3(place, bucket, variables).map_err(unusable)?,
                Service::Google => google(place, bucket, variables).map_err(unusable)?,
                Service::Azure => azure(place, bucket, variables).map_err(unusable)?,
            };
            Ok((store, prefix.clone()))
        }
    }
}

fn s3(place: &RemotePlace, bucket: &str, variables: &Variables) -> Result<Arc<dyn ObjectStore>, object_store::Error> {
    let mut builder = settings(variables, "AWS_")
        .fold(AmazonS3Builder::new(), |builder, (key, value)| builder.with_config(key, value));
    builder = builder.with_bucket_name(bucket).with_retry(retry());
    if let Some(endpoint) = &place.endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    if let Some(region) = &place.region {
        builder = builder.with_region(region);
    }
    let named = |key| builder.get_config_value(&key);
    let endpoint = named(AmazonS3ConfigKey::S3Endpoint).or_else(|| named(AmazonS3ConfigKey::Endpoint));
    Ok(Arc::new(builder.with_client_options(client(endpoint.as_deref())).build()?))
}

fn google(
    place: &RemotePlace,
    bucket: &str,
    variables: &Variables,
) -> Result<Arc<dyn ObjectStore>, object_store::Error> {
    let mut builder = settings(variables, "GOOGLE_")
        .fold(GoogleCloudStorageBuilder::new(), |builder, (key, value)| builder.with_config(key, value));
    builder = builder.with_bucket_name(bucket).with_retry(retry());
    if let Some(endpoint) = &place.endpoint {
        builder = builder.with_base_url(endpoint);
    }
    Ok(Arc::new(builder.with_client_options(client(place.endpoint.as_deref())).build()?))
}

fn azure(
    place: &RemotePlace,
    container: &str,
    variables: &Variables,
) -> Result<Arc<dyn ObjectStore>, object_store::Error> {
    let mut builder = settings(variables, "AZURE_")
        .fold(MicrosoftAzureBuilder::new(), |builder, (key, value)| builder.with_config(key, value));
    builder = builder.with_container_name(container).with_retry(retry());
    if let Some(endpoint) = &place.endpoint {
        builder = builder.with_endpoint(endpoint.clone());
    }
    Ok(Arc::new(builder.with_client_options(client(place.endpoint.as_deref())).build()?))
}

/// What the environment sets for a service: `AWS_ACCESS_KEY_ID` is the setting `aws_access_key_id`.
fn settings<K: FromStr>(variables: &Variables, prefix: &'static str) -> impl Iterator<Item = (K, String)> {
    let of_service = variables.iter().filter(move |(name, value)| name.starts_with(prefix) && !value.is_empty());
    of_service.filter_map(|(name, value)| Some((name.to_ascii_lowercase().parse().ok()?, value.clone())))
}

/// Who names an `http://` endpoint means it; without one it is `https://` always.
fn client(endpoint: Option<&str>) -> ClientOptions {
    ClientOptions::new()
        .with_allow_http(endpoint.is_some_and(|endpoint| endpoint.starts_with("http://")))
        .with_timeout(REQUEST_TIMEOUT)
        .with_read_timeout(SILENCE)
        .with_connect_timeout(CONNECT_TIMEOUT)
}

/// A few seconds of a server that does not answer: whoever asks goes on without it.
fn retry() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(200),
            max_backoff: Duration::from_secs(5),
            base: 2.0,
        },
        max_retries: 5,
        retry_timeout: Duration::from_secs(60),
    }
}
