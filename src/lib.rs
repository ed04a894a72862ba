//! Memory of Huawei Ascend NPUs from user space.

pub mod discovery;
