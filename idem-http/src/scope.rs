//! Whose key it is.

use http::request::Parts;
use idem_core::Scope;

/// Says whose keys a request uses: the same key of two scopes is two keys, and nobody meets the answers of others.
///
/// Take the scope from what the server knows of the caller (the account that a layer further out has authenticated and put
/// into the request's extensions), never from what the client sends alone. `None` refuses the request with
/// [`ScopeUnknown`](crate::Reason::ScopeUnknown). A body is not needed, and not there.
///
/// Implemented for closures of `Fn(&Parts) -> Option<Scope>`.
///
/// ```
/// use idem_http::Scope;
///
/// #[derive(Clone)]
/// struct Account(String);
///
/// let scope = |parts: &http::request::Parts| Scope::new(&parts.extensions.get::<Account>()?.0).ok();
/// # fn is_one(_: impl idem_http::RequestScope) {}
/// # is_one(scope);
/// ```
pub trait RequestScope: Send + Sync + 'static {
    /// The scope, or `None` where the caller is unknown.
    fn scope(&self, request: &Parts) -> Option<Scope>;
}

impl<F> RequestScope for F
where
    F: Fn(&Parts) -> Option<Scope> + Send + Sync + 'static,
{
    fn scope(&self, request: &Parts) -> Option<Scope> {
        self(request)
    }
}

/// One scope for all: whoever knows or guesses a key gets its answer. For services with a single client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct SingleTenant;

impl RequestScope for SingleTenant {
    fn scope(&self, _request: &Parts) -> Option<Scope> {
        Some(Scope::default())
    }
}
