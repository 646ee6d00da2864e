//! The way to the server: connecting, connecting again, and sending.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use idem_core::{ErrorClass, ErrorKind, Operation, StoreError};
use redis::aio::{ConnectionManager, MultiplexedConnection};
use redis::cluster::{ClusterClient, ClusterClientBuilder, ClusterConfig};
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{MultipleNodeRoutingInfo, Route, RoutingInfo, SingleNodeRoutingInfo, SlotAddr};
use redis::io::tcp::TcpSettings;
use redis::sentinel::{SentinelClient, SentinelNodeConnectionInfo, SentinelServerType};
use redis::{
    Arg, AsyncConnectionConfig, Client, Cmd, ErrorKind as Driver, IntoConnectionInfo, Pipeline, RedisError,
    ServerError, ServerErrorKind, Value,
};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use crate::config::{Acknowledge, Config, Fsync};
use crate::error::{RedisStoreError, STORE, Trouble, own_error, setup_error};

/// How a store reaches its server: what [`RedisStore::open`](crate::RedisStore::open) takes.
///
/// Of a [`Client`] or a [`SentinelClient`], the store makes its own connections, and makes them anew where they break. TLS,
/// users and passwords are the client's, by its URL or its builder.
///
/// A [`ConnectionManager`] is the caller's, and may be shared with whatever else uses it; it connects again by itself. Its
/// own response timeout applies as well. A cluster is given as a [`ClusterClientBuilder`], of which the store sets the
/// number of retries to none: it repeats by itself, and has to know of every delivery.
pub struct Connection(Kind);

enum Kind {
    Server(Client),
    Manager(ConnectionManager),
    Sentinel(Box<SentinelClient>),
    Cluster(Box<ClusterClientBuilder>),
}

impl From<Client> for Connection {
    fn from(client: Client) -> Self {
        Self(Kind::Server(client))
    }
}

impl From<ConnectionManager> for Connection {
    fn from(manager: ConnectionManager) -> Self {
        Self(Kind::Manager(manager))
    }
}

impl From<SentinelClient> for Connection {
    fn from(client: SentinelClient) -> Self {
        Self(Kind::Sentinel(Box::new(client)))
    }
}

impl From<ClusterClientBuilder> for Connection {
    fn from(client: ClusterClientBuilder) -> Self {
        Self(Kind::Cluster(Box::new(client)))
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the clients, which hold passwords.
        f.write_str(match self.0 {
            Kind::Server(_) => "Connection(Server)",
            Kind::Manager(_) => "Connection(Manager)",
            Kind::Sentinel(_) => "Connection(Sentinel)",
            Kind::Cluster(_) => "Connection(Cluster)",
        })
    }
}

/// A client of that URL whose connections send at once: without `TCP_NODELAY`, a second small write waits for the
/// acknowledgement of the first.
pub(crate) fn client(url: impl IntoConnectionInfo) -> Result<Client, RedisError> {
    let info = url.into_connection_info()?;
    let tcp = info.tcp_settings().clone().set_nodelay(true);
    Client::open(info.set_tcp_settings(tcp))
}

/// A cluster's client, of these URLs.
pub(crate) fn cluster_client<T: IntoConnectionInfo>(nodes: impl IntoIterator<Item = T>) -> ClusterClientBuilder {
    ClusterClient::builder(nodes).tcp_settings(TcpSettings::default().set_nodelay(true))
}

/// The way to the server.
pub(crate) struct Link {
    to: To,
    acknowledge: Acknowledge,
    response_timeout: Duration,
}

enum To {
    Own(Box<Socket<Server>>),
    Manager(ConnectionManager),
    Cluster(Box<Socket<Cluster>>),
}

impl Link {
    pub(crate) fn new(connection: Connection, config: &Config) -> Result<Self, RedisError> {
        let patience = config.response_timeout;
        let own = |address| {
            let timeouts = AsyncConnectionConfig::new()
                .set_connection_timeout(Some(patience))
                // Counted here, so that there is one timer for a pipeline and not two.
                .set_response_timeout(None)
                .set_pipeline_buffer_size(1_024);
            To::Own(Box::new(Socket::new(Server { address, timeouts }, patience)))
        };
        let to = match connection.0 {
            Kind::Server(client) => own(Address::Given(client)),
            Kind::Sentinel(client) => own(Address::Sentinel(tokio::sync::Mutex::new(*client))),
            Kind::Manager(manager) => To::Manager(manager),
            Kind::Cluster(client) => {
                let timeouts = ClusterConfig::new().set_connection_timeout(patience).set_response_timeout(patience);
                // What was not answered is repeated by the store: whether an earlier delivery may have had its effect
                // decides what a later one means.
                let client = client.retries(0).build()?;
                To::Cluster(Box::new(Socket::new(Cluster { client, timeouts }, patience)))
            }
        };
        Ok(Self { to, acknowledge: config.acknowledge, response_timeout: config.response_timeout })
    }

    pub(crate) fn is_cluster(&self) -> bool {
        matches!(self.to, To::Cluster(_))
    }

    /// Sends a script's command, and waits no longer than until then.
    pub(crate) async fn one(&self, command: &Cmd, deadline: Instant) -> Result<Value, Trouble> {
        // A single server asks for no slot.
        let node = if self.is_cluster() { of_key(command) } else { SingleNodeRoutingInfo::Random };
        let answer = if self.acknowledge.waits() {
            Box::pin(self.alone(command, node, false, deadline)).await
        } else {
            self.send(command, RoutingInfo::SingleNode(node), deadline).await
        };
        // The key's slot has moved, or moves and the key has gone ahead: the node that it goes to is asked.
        let Err(Trouble::Server(error)) = &answer else { return answer };
        let asking = match error.kind() {
            Some(ServerErrorKind::Moved) => false,
            Some(ServerErrorKind::Ask) => true,
            _ => return answer,
        };
        let redirected = RedisError::from(error.clone());
        match redirected.redirect_node().and_then(|(node, _)| address(node)) {
            Some(node) if self.is_cluster() => Box::pin(self.alone(command, node, asking, deadline)).await,
            _ => answer,
        }
    }

    /// Sends one command in a pipeline of its own: behind `ASKING` where that is needed, which counts for the next command
    /// of the connection alone, and before what waits for replicas.
    async fn alone(
        &self,
        command: &Cmd,
        node: SingleNodeRoutingInfo,
        asking: bool,
        deadline: Instant,
    ) -> Result<Value, Trouble> {
        let mut pipeline = Pipeline::with_capacity(3);
        if asking {
            pipeline.cmd("ASKING");
        }
        pipeline.add_command(command.clone());
        let mut values = self.pipeline_to(pipeline, node, deadline).await?;
        values.pop().unwrap_or(Err(Trouble::Gone))
    }

    /// How long an answer may take. On a cluster the driver may have to look for the slots' nodes first.
    fn patience(&self) -> Duration {
        if self.is_cluster() { self.response_timeout * 2 } else { self.response_timeout }
    }

    /// Sends one command, on a cluster by that routing.
    async fn send(&self, command: &Cmd, routing: RoutingInfo, deadline: Instant) -> Result<Value, Trouble> {
        let answered_by = || deadline.min(Instant::now() + self.patience());
        match &self.to {
            To::Own(socket) => {
                let (generation, mut connection) = socket.get(deadline).await?;
                let answer = timeout_at(answered_by(), connection.send_packed_command(command)).await;
                socket.judge(generation, answer, is_read_only)
            }
            To::Manager(manager) => {
                let mut manager = manager.clone();
                bounded(timeout_at(answered_by(), manager.send_packed_command(command)).await)
            }
            To::Cluster(socket) => {
                let (generation, mut cluster) = socket.get(deadline).await?;
                let answer = timeout_at(answered_by(), cluster.route_command(command.clone(), routing)).await;
                socket.judge_cluster(generation, answer)
            }
        }
    }

    /// Sends scripts' commands together: on a cluster, their keys have to be of one slot. An answer each.
    pub(crate) async fn pipeline(
        &self,
        pipeline: Pipeline,
        deadline: Instant,
    ) -> Result<Vec<Result<Value, Trouble>>, Trouble> {
        let commands = pipeline.len();
        let node = pipeline.cmd_iter().next().filter(|_| self.is_cluster()).map(of_key);
        let answers = self.pipeline_to(pipeline, node.unwrap_or(SingleNodeRoutingInfo::Random), deadline).await;
        match answers {
            // The driver tells one command's error for all: the others may have been executed.
            Err(Trouble::Server(error)) if commands > 1 => Err(Trouble::Lost(error.into())),
            answers => answers,
        }
    }

    async fn pipeline_to(
        &self,
        mut pipeline: Pipeline,
        node: SingleNodeRoutingInfo,
        deadline: Instant,
    ) -> Result<Vec<Result<Value, Trouble>>, Trouble> {
        let answered_by = || deadline.min(Instant::now() + self.patience());
        let commands = pipeline.len();
        let waits = self.add_waiting(&mut pipeline);
        let mut values = match &self.to {
            To::Own(socket) => {
                let (generation, mut connection) = socket.get(deadline).await?;
                let sent = connection.send_packed_commands(&pipeline, 0, pipeline.len());
                let answer = timeout_at(answered_by(), sent).await;
                socket.judge(generation, answer, |values| values.iter().any(is_read_only))?
            }
            To::Manager(manager) => {
                let (mut manager, count) = (manager.clone(), pipeline.len());
                bounded(timeout_at(answered_by(), manager.send_packed_commands(&pipeline, 0, count)).await)?
            }
            To::Cluster(socket) => {
                let ((generation, mut cluster), count) = (socket.get(deadline).await?, pipeline.len());
                let answer = timeout_at(answered_by(), cluster.route_pipeline(pipeline, 0, count, node)).await;
                socket.judge_cluster(generation, answer)?
            }
        };
        let too_few = if waits {
            values.split_off(commands.min(values.len())).iter().find_map(|value| self.too_few(value))
        } else {
            None
        };
        Ok(values
            .into_iter()
            .map(|value| match &too_few {
                // Any answer: a master that was replaced and does not know it yet has nobody to confirm what it tells.
                Some(trouble) if !matches!(value, Value::ServerError(_)) => Err(trouble.clone()),
                _ => Ok(value),
            })
            .collect())
    }

    /// Adds what waits for replicas and disks, if anything does. It counts for all commands before it, and holds up the
    /// connection's next ones meanwhile.
    fn add_waiting(&self, pipeline: &mut Pipeline) -> bool {
        let Acknowledge { replicas, fsync, timeout } = self.acknowledge;
        let millis = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX).max(1);
        if replicas > 0 && fsync != Fsync::ServerAndReplicas {
            pipeline.cmd("WAIT").arg(replicas).arg(millis);
        }
        match fsync {
            Fsync::None => {}
            Fsync::Server => {
                pipeline.cmd("WAITAOF").arg(1).arg(0).arg(millis);
            }
            Fsync::ServerAndReplicas => {
                pipeline.cmd("WAITAOF").arg(1).arg(replicas).arg(millis);
            }
        }
        self.acknowledge.waits()
    }

    /// What is wrong with the answer to a `WAIT` or `WAITAOF`, if anything.
    fn too_few(&self, value: &Value) -> Option<Trouble> {
        let replicas = i64::from(self.acknowledge.replicas);
        let (found, wanted) = match value {
            Value::Int(found) => (*found, replicas),
            Value::Array(both) => match both[..] {
                [Value::Int(server), Value::Int(others)] => {
                    let wanted = if self.acknowledge.fsync == Fsync::ServerAndReplicas { replicas } else { 0 };
                    (server.min(1) + others.min(wanted), 1 + wanted)
                }
                _ => (0, 1),
            },
            _ => (0, 1),
        };
        let waited = self.acknowledge.timeout;
        let trouble = || Trouble::TooFew(Arc::new(RedisStoreError::TooFewAcknowledged { found, wanted, waited }));
        (found < wanted).then(trouble)
    }

    /// Sends a command to each master. An answer each, in no order, with the node's address on a cluster.
    pub(crate) async fn each_master(
        &self,
        command: &Cmd,
        deadline: Instant,
    ) -> Result<Vec<(Option<String>, Value)>, Trouble> {
        let all = RoutingInfo::MultiNode((MultipleNodeRoutingInfo::AllMasters, None));
        match self.send(command, all, deadline).await? {
            Value::Map(answers) if self.is_cluster() => Ok(answers
                .into_iter()
                .map(|(node, value)| (redis::from_redis_value::<String>(node).ok(), value))
                .collect()),
            value => Ok(vec![(None, value)]),
        }
    }

    /// Sends a command to that node of a cluster, or to the server.
    pub(crate) async fn to_node(&self, node: Option<&str>, command: &Cmd, deadline: Instant) -> Result<Value, Trouble> {
        let node = node.and_then(address).unwrap_or(SingleNodeRoutingInfo::RandomPrimary);
        self.send(command, RoutingInfo::SingleNode(node), deadline).await
    }
}

/// The master of the key that a script's command is about: it stands behind the script and the number of keys.
fn of_key(command: &Cmd) -> SingleNodeRoutingInfo {
    match command.args_iter().nth(3) {
        Some(Arg::Simple(key)) => SingleNodeRoutingInfo::SpecificNode(Route::with_key(key, SlotAddr::Master)),
        _ => SingleNodeRoutingInfo::Random,
    }
}

/// The node of that address, as a cluster gives it: `host:port`.
fn address(node: &str) -> Option<SingleNodeRoutingInfo> {
    let (host, port) = node.rsplit_once(':')?;
    Some(SingleNodeRoutingInfo::ByAddress { host: host.to_owned(), port: port.parse().ok()? })
}

/// What the driver of a cluster met with the one delivery that it makes.
fn of_cluster(error: RedisError) -> Trouble {
    match ServerError::try_from(error) {
        Ok(server) => Trouble::Server(server),
        Err(error) if error.kind() == Driver::ClusterConnectionNotFound => Trouble::Connect(error),
        Err(error) => Trouble::Lost(error),
    }
}

fn bounded<T>(answer: Result<Result<T, RedisError>, tokio::time::error::Elapsed>) -> Result<T, Trouble> {
    match answer {
        Ok(answer) => answer.map_err(Trouble::Lost),
        Err(_) => Err(Trouble::Timeout { sent: true }),
    }
}

fn is_read_only(value: &Value) -> bool {
    matches!(value, Value::ServerError(error) if error.kind() == Some(ServerErrorKind::ReadOnly))
}

/// What a socket connects to.
trait Target {
    type Connection: Clone;

    async fn connect(&self) -> Result<Self::Connection, RedisError>;
}

/// One server.
struct Server {
    address: Address,
    timeouts: AsyncConnectionConfig,
}

enum Address {
    Given(Client),
    Sentinel(tokio::sync::Mutex<SentinelClient>),
}

impl Target for Server {
    type Connection = MultiplexedConnection;

    async fn connect(&self) -> Result<MultiplexedConnection, RedisError> {
        match &self.address {
            Address::Given(client) => client.get_multiplexed_async_connection_with_config(&self.timeouts).await,
            Address::Sentinel(client) => {
                // Asked anew each time: the sentinels know the master of now.
                let client = client.lock().await.async_get_client().await?;
                client.get_multiplexed_async_connection_with_config(&self.timeouts).await
            }
        }
    }
}

/// A cluster: the driver's connection to it keeps those to the nodes.
struct Cluster {
    client: ClusterClient,
    timeouts: ClusterConfig,
}

impl Target for Cluster {
    type Connection = ClusterConnection;

    async fn connect(&self) -> Result<ClusterConnection, RedisError> {
        self.client.get_async_connection_with_config(self.timeouts.clone()).await
    }
}

/// A connection that is made when it is needed, and made anew when it has broken: by one caller for all, with a back-off.
struct Socket<T: Target> {
    target: T,
    /// How long one try to connect may take: more than the driver's own bound, for asking sentinels before.
    patience: Duration,
    current: Mutex<Current<T::Connection>>,
    connecting: tokio::sync::Mutex<Connecting>,
}

struct Current<C> {
    /// Counts connections, so that a late report about an older one does not close the one after it.
    generation: u64,
    connection: Option<C>,
}

#[derive(Default)]
struct Connecting {
    failures: u32,
    failed: Option<(Instant, RedisError)>,
}

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

impl<T: Target> Socket<T> {
    fn new(target: T, patience: Duration) -> Self {
        let current = Current { generation: 0, connection: None };
        Self { target, patience: patience * 2, current: Mutex::new(current), connecting: Default::default() }
    }

    fn current(&self) -> Option<(u64, T::Connection)> {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        current.connection.clone().map(|connection| (current.generation, connection))
    }

    async fn get(&self, deadline: Instant) -> Result<(u64, T::Connection), Trouble> {
        if let Some(current) = self.current() {
            return Ok(current);
        }
        // Apart: it is large, and seldom needed.
        timeout_at(deadline, Box::pin(self.connected())).await.unwrap_or(Err(Trouble::Timeout { sent: false }))
    }

    async fn connected(&self) -> Result<(u64, T::Connection), Trouble> {
        let asked = Instant::now();
        let mut connecting = self.connecting.lock().await;
        if let Some(current) = self.current() {
            return Ok(current);
        }
        if let Some((at, error)) = &connecting.failed {
            // Who has waited for somebody else's try shares what it found.
            if *at >= asked {
                return Err(Trouble::Connect(error.clone()));
            }
            let pause = (FIRST_PAUSE * 2_u32.saturating_pow(connecting.failures.min(10))).min(LONGEST_PAUSE);
            sleep_until(*at + pause.mul_f64(rand::random_range(0.5..1.0))).await;
        }
        let connected = timeout(self.patience, self.target.connect())
            .await
            .unwrap_or_else(|_| Err(RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut))));
        match connected {
            Ok(connection) => {
                *connecting = Connecting::default();
                let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
                current.generation += 1;
                current.connection = Some(connection.clone());
                Ok((current.generation, connection))
            }
            Err(error) => {
                connecting.failures = connecting.failures.saturating_add(1);
                connecting.failed = Some((Instant::now(), error.clone()));
                Err(Trouble::Connect(error))
            }
        }
    }

    /// Looks at an answer: a connection that has broken, that does not answer, or that leads to a replica is not used
    /// again. What is under way on it may still be answered.
    fn judge<V>(
        &self,
        generation: u64,
        answer: Result<Result<V, RedisError>, tokio::time::error::Elapsed>,
        is_read_only: impl Fn(&V) -> bool,
    ) -> Result<V, Trouble> {
        let answer = bounded(answer);
        let broken = match &answer {
            Ok(value) => is_read_only(value),
            Err(Trouble::Lost(error)) => error.is_unrecoverable_error() || error.kind() == Driver::Io,
            Err(_) => true,
        };
        if broken {
            self.give_up(generation);
        }
        answer
    }

    /// Lets the next call make a new connection.
    fn give_up(&self, generation: u64) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.generation == generation {
            current.connection = None;
        }
    }
}

impl Socket<Cluster> {
    /// Looks at an answer. The driver mends what breaks by itself, but for one thing: when a slot had moved under load, it was
    /// seen to wait for ever on its way to the new nodes (`pitfall_42_slots_move_under_load`). What does not answer is
    /// given up, and made anew.
    fn judge_cluster<V>(
        &self,
        generation: u64,
        answer: Result<Result<V, RedisError>, tokio::time::error::Elapsed>,
    ) -> Result<V, Trouble> {
        match answer {
            Ok(answer) => answer.map_err(of_cluster),
            Err(_) => {
                self.give_up(generation);
                Err(Trouble::Timeout { sent: true })
            }
        }
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("is_cluster", &self.is_cluster()).finish_non_exhaustive()
    }
}

/// A client that asks these sentinels for the master of that name.
pub(crate) fn sentinel_client<T: IntoConnectionInfo>(
    sentinels: impl IntoIterator<Item = T>,
    master: &str,
) -> Result<SentinelClient, RedisError> {
    let sentinels = sentinels.into_iter().map(IntoConnectionInfo::into_connection_info);
    let sentinels = sentinels.collect::<Result<Vec<_>, _>>()?;
    let tcp = TcpSettings::default().set_nodelay(true);
    let node = SentinelNodeConnectionInfo::default().set_tcp_settings(tcp);
    SentinelClient::build(sentinels, master.to_owned(), Some(node), SentinelServerType::Master)
}

/// Looks whether one of the nodes can be reached and is a cluster's: the driver does not tell why it found no cluster.
pub(crate) async fn check_nodes<T: IntoConnectionInfo + Clone>(
    nodes: &[T],
    patience: Duration,
) -> Result<(), StoreError> {
    let mut failed = None;
    for node in nodes {
        let look = async {
            let mut connection = client(node.clone())?.get_multiplexed_async_connection().await?;
            let mut info = redis::cmd("INFO");
            info.arg("cluster").query_async::<String>(&mut connection).await
        };
        match timeout(patience, look).await {
            Ok(Ok(told)) if told.contains("cluster_enabled:0") => {
                return Err(own_error(RedisStoreError::IsNoCluster, Operation::Setup));
            }
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(error)) => failed = Some(setup_error(error)),
            Err(_) => {}
        }
    }
    if nodes.is_empty() {
        // The driver says so.
        return Ok(());
    }
    let silent = || StoreError::new(ErrorKind::Timeout, STORE, Operation::Setup).with_class(ErrorClass::Retryable);
    Err(failed.unwrap_or_else(silent))
}
