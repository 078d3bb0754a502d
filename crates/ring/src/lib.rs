//! The shared-memory ring between a subscription's leader and its appliers.
