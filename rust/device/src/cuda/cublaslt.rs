//! Matrix products by NVIDIA's cuBLASLt, loaded from where [`LibraryPaths`] finds it.
//!
//! cuBLASLt counts in columns: our rows of `out` are its columns, so it computes `out^T = weight x^T`.

use std::{
    collections::HashMap,
    ffi::{CStr, c_char, c_int, c_void},
    ptr::{from_mut, from_ref, null_mut},
    sync::{Mutex, PoisonError},
};

use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtMatmulAlgo_t, cublasLtMatmulDescAttributes_t, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreferenceAttributes_t, cudaDataType_t,
};

use crate::kernel_args::ElementType;

use super::{
    CudaError, Library, LibraryPaths,
    driver::{MATMUL_WORKSPACE, Matmul},
};

/// Shapes whose algorithm is kept; a server of prompts sees many lengths.
const MAX_PLANS: usize = 4096;

/// `CUBLAS_OP_T` of cublas_api.h.
const TRANSPOSED: c_int = 1;

type Handle = *mut c_void;
type Status = c_int;

macro_rules! functions {
    ($($name:ident = $symbol:literal($($argument:ty),*) -> $result:ty;)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> $result,)*
            _library: libloading::Library,
        }

        impl Functions {
            fn load(library: libloading::Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the types are those of cublasLt.h.
                    $($name: *unsafe { library.get($symbol) }?,)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    create = b"cublasLtCreate"(*mut Handle) -> Status;
    destroy = b"cublasLtDestroy"(Handle) -> Status;
    status_name = b"cublasLtGetStatusName"(Status) -> *const c_char;
    desc_create = b"cublasLtMatmulDescCreate"(*mut Handle, cublasComputeType_t, cudaDataType_t) -> Status;
    desc_set = b"cublasLtMatmulDescSetAttribute"(Handle, cublasLtMatmulDescAttributes_t, *const c_void, usize) -> Status;
    desc_destroy = b"cublasLtMatmulDescDestroy"(Handle) -> Status;
    layout_create = b"cublasLtMatrixLayoutCreate"(*mut Handle, cudaDataType_t, u64, u64, i64) -> Status;
    layout_destroy = b"cublasLtMatrixLayoutDestroy"(Handle) -> Status;
    preference_create = b"cublasLtMatmulPreferenceCreate"(*mut Handle) -> Status;
    preference_set = b"cublasLtMatmulPreferenceSetAttribute"(
        Handle, cublasLtMatmulPreferenceAttributes_t, *const c_void, usize) -> Status;
    preference_destroy = b"cublasLtMatmulPreferenceDestroy"(Handle) -> Status;
    heuristic = b"cublasLtMatmulAlgoGetHeuristic"(
        Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut cublasLtMatmulHeuristicResult_t, *mut c_int) -> Status;
    matmul = b"cublasLtMatmul"(
        Handle, Handle, *const c_void, *const c_void, Handle, *const c_void, Handle, *const c_void, *const c_void, Handle,
        *mut c_void, Handle, *const cublasLtMatmulAlgo_t, *mut c_void, usize, *mut c_void) -> Status;
}

/// The library, and what it advised for the shapes that it was asked for.
pub struct CublasLt {
    functions: Functions,
    handle: Handle,
    plans: Mutex<HashMap<Shape, Plan>>,
}

// SAFETY: the library's handle may be used from any thread of the context; plans are behind a lock.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    element: u32,
    rows: usize,
    out_features: usize,
    in_features: usize,
    out_stride: usize,
}

/// Descriptions of a product, and how to compute it.
struct Plan {
    operation: Handle,
    weight: Handle,
    x: Handle,
    out: Handle,
    algorithm: cublasLtMatmulAlgo_t,
}

impl CublasLt {
    /// Loads and starts the library; the GPU's context is current.
    ///
    /// Errors: [`CudaError::MissingLibrary`], [`CudaError::Driver`] when it does not start.
    pub fn load(paths: &LibraryPaths) -> Result<Self, CudaError> {
        let path = paths.locate(Library::CublasLt)?;
        let refused = |error: libloading::Error| CudaError::Driver { what: "loading cuBLASLt".into(), code: error.to_string() };
        // SAFETY: `locate` has loaded it before.
        let functions = Functions::load(unsafe { libloading::Library::new(path) }.map_err(refused)?).map_err(refused)?;
        let mut lt = Self { functions, handle: null_mut(), plans: Mutex::default() };
        // SAFETY: the handle is good for the write.
        let status = unsafe { (lt.functions.create)(&raw mut lt.handle) };
        lt.check("starting cuBLASLt", status)?;
        Ok(lt)
    }

    /// Starts a product on a stream of the current context.
    ///
    /// # Safety
    /// As of [`Driver::matmul`](super::Driver::matmul).
    pub unsafe fn matmul(&self, matmul: &Matmul, stream: *mut c_void) -> Result<(), CudaError> {
        let Matmul { x, weight, out, element, rows, out_features, in_features, out_stride, .. } = *matmul;
        let shape = Shape { element: element as u32, rows, out_features, in_features, out_stride };
        let what = || format!("multiplying [{rows}, {in_features}] by [{out_features}, {in_features}] of {element:?}");
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if plans.len() >= MAX_PLANS {
            for (_, plan) in plans.drain() {
                self.forget(&plan);
            }
        }
        let plan = match plans.entry(shape) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => entry.insert(self.plan(shape, element, &what())?),
        };
        let (alpha, beta) = (matmul.scale, f32::from(matmul.accumulate));
        // SAFETY: the caller's promise; the plan describes these shapes, the scalars are read before this returns.
        let status = unsafe {
            (self.functions.matmul)(
                self.handle,
                plan.operation,
                from_ref(&alpha).cast(),
                weight as *const c_void,
                plan.weight,
                x as *const c_void,
                plan.x,
                from_ref(&beta).cast(),
                out as *const c_void,
                plan.out,
                out as *mut c_void,
                plan.out,
                &raw const plan.algorithm,
                matmul.workspace as *mut c_void,
                MATMUL_WORKSPACE,
                stream,
            )
        };
        self.check(&what(), status)
    }

    fn plan(&self, shape: Shape, element: ElementType, what: &str) -> Result<Plan, CudaError> {
        let f = &self.functions;
        let stored = match element {
            ElementType::F32 => cudaDataType_t::CUDA_R_32F,
            ElementType::F16 => cudaDataType_t::CUDA_R_16F,
            ElementType::BF16 => cudaDataType_t::CUDA_R_16BF,
        };
        // SAFETY: an algorithm is plain numbers.
        let algorithm = unsafe { std::mem::zeroed() };
        let mut plan = Plan { operation: null_mut(), weight: null_mut(), x: null_mut(), out: null_mut(), algorithm };
        let (k, n, rows, stride) =
            (shape.in_features as u64, shape.out_features as u64, shape.rows as u64, shape.out_stride as i64);
        let transposed = TRANSPOSED;
        let mut preference = null_mut();
        let (workspace, mut found) = (MATMUL_WORKSPACE, 0);
        // SAFETY: a result is plain numbers.
        let mut result: cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let attribute = cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        let most = cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: every handle is good for the write, attributes have the sizes that the library documents, and what is asked
        // about was made before. Addresses have the alignment that is the preference's default, 256, but for columns of `out`
        // within it, which are multiples of 64.
        let mut made = || unsafe {
            let compute = cublasComputeType_t::CUBLAS_COMPUTE_32F;
            self.check(what, (f.desc_create)(&raw mut plan.operation, compute, cudaDataType_t::CUDA_R_32F))?;
            self.check(what, (f.desc_set)(plan.operation, attribute, from_ref(&transposed).cast(), size_of_val(&transposed)))?;
            self.check(what, (f.layout_create)(&raw mut plan.weight, stored, k, n, k as i64))?;
            self.check(what, (f.layout_create)(&raw mut plan.x, stored, k, rows, k as i64))?;
            self.check(what, (f.layout_create)(&raw mut plan.out, cudaDataType_t::CUDA_R_32F, n, rows, stride))?;
            self.check(what, (f.preference_create)(&raw mut preference))?;
            self.check(what, (f.preference_set)(preference, most, from_ref(&workspace).cast(), size_of_val(&workspace)))?;
            let Plan { operation, weight, x, out, .. } = plan;
            let asked =
                (f.heuristic)(self.handle, operation, weight, x, out, out, preference, 1, from_mut(&mut result), &raw mut found);
            self.check(what, asked)
        };
        let made = made().and_then(|()| match found {
            0 => Err(CudaError::Driver { what: what.into(), code: "CUBLAS_STATUS_NOT_SUPPORTED".into() }),
            _ => Ok(()),
        });
        if !preference.is_null() {
            // SAFETY: it was made above and is no longer used.
            unsafe { (f.preference_destroy)(preference) };
        }
        plan.algorithm = result.algo;
        match made {
            Ok(()) => Ok(plan),
            Err(error) => {
                self.forget(&plan);
                Err(error)
            }
        }
    }

    fn forget(&self, plan: &Plan) {
        let layouts = [plan.weight, plan.x, plan.out].map(|layout| (layout, self.functions.layout_destroy));
        for (handle, destroy) in layouts.into_iter().chain([(plan.operation, self.functions.desc_destroy)]) {
            if !handle.is_null() {
                // SAFETY: the library made it, and nobody uses it any more: a product has read it when its call returns.
                unsafe { destroy(handle) };
            }
        }
    }

    fn check(&self, what: &str, status: Status) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the library gives a name, which lives as long as it, to every number.
        let name = unsafe { CStr::from_ptr((self.functions.status_name)(status)) };
        Err(CudaError::Driver { what: what.into(), code: name.to_string_lossy().into_owned() })
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        let plans = std::mem::take(&mut *self.plans.lock().unwrap_or_else(PoisonError::into_inner));
        for plan in plans.values() {
            self.forget(plan);
        }
        // SAFETY: it was made once, if at all, and is no longer used.
        let _ = (!self.handle.is_null()).then(|| unsafe { (self.functions.destroy)(self.handle) });
    }
}
