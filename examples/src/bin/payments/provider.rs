//! The payment provider: the outside world, where an effect cannot be taken back.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What a client asks for.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Order {
    /// In cents.
    pub(crate) amount: u32,
    pub(crate) card: String,
}

/// What it gets.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Charge {
    pub(crate) id: String,
    pub(crate) amount: u32,
    pub(crate) status: String,
}

/// Why a card was not charged.
#[derive(Debug, Clone)]
pub(crate) enum ChargeError {
    Declined,
    Timeout,
    /// The database did not take it, or did not say so. The text is for operators.
    Ledger(String),
}

impl fmt::Display for ChargeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Declined => "the card was declined",
            Self::Timeout => "the provider did not answer in time",
            Self::Ledger(text) => text,
        })
    }
}

/// Every call charges: that it is called once per order is the caller's business.
#[derive(Debug, Default)]
pub(crate) struct Provider(Mutex<Book>);

#[derive(Debug, Default)]
struct Book {
    accounts: HashMap<String, Account>,
    charges: u64,
}

/// What an account was charged.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Account {
    /// In cents.
    pub(crate) balance: u64,
    pub(crate) charges: u64,
    /// Calls to the provider, also those that charged nothing.
    pub(crate) calls: u32,
}

impl Provider {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the card network whether the card bears it. Nothing is charged yet.
    pub(crate) async fn authorize(&self, account: &str, order: &Order, attempt: u32) -> Result<(), ChargeError> {
        self.book().accounts.entry(account.to_owned()).or_default().calls += 1;
        match order.card.as_str() {
            "declined" => Err(ChargeError::Declined),
            "flaky" if attempt == 1 => Err(ChargeError::Timeout),
            "slow" => {
                tokio::time::sleep(Duration::from_millis(700)).await;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    pub(crate) async fn charge(&self, account: &str, order: &Order, attempt: u32) -> Result<Charge, ChargeError> {
        self.authorize(account, order, attempt).await?;
        let mut book = self.book();
        book.charges += 1;
        let id = format!("ch_{}", book.charges);
        let account = book.accounts.entry(account.to_owned()).or_default();
        account.balance += u64::from(order.amount);
        account.charges += 1;
        Ok(Charge { id, amount: order.amount, status: "succeeded".to_owned() })
    }

    pub(crate) fn account(&self, account: &str) -> Account {
        self.book().accounts.get(account).cloned().unwrap_or_default()
    }
}
