//! Shapes that are carried and checked.

#[cfg(target_endian = "big")]
compile_error!("safetensors are little-endian and Ster reads them in place");

use crate::kernels::quant;

/// Numbers as they lie in a checkpoint file. Widening any of them to f32 is exact: the block formats of GGUF define an f32 value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    IQ4NL,
}

impl Dtype {
    pub const ALL: [Dtype; 14] = [
        Dtype::F32,
        Dtype::F16,
        Dtype::BF16,
        Dtype::Q4_0,
        Dtype::Q4_1,
        Dtype::Q5_0,
        Dtype::Q5_1,
        Dtype::Q8_0,
        Dtype::Q2K,
        Dtype::Q3K,
        Dtype::Q4K,
        Dtype::Q5K,
        Dtype::Q6K,
        Dtype::IQ4NL,
    ];

    /// GGUF's name, ggml's id of the type, numbers of a block, bytes of a block. Source: `GGML_QUANT_SIZES` and `GGMLQuantizationType`
    /// in gguf-py's `constants.py`.
    fn facts(self) -> (&'static str, u32, usize, usize) {
        match self {
            Dtype::F32 => ("F32", 0, 1, 4),
            Dtype::F16 => ("F16", 1, 1, 2),
            Dtype::BF16 => ("BF16", 30, 1, 2),
            Dtype::Q4_0 => ("Q4_0", 2, 32, 18),
            Dtype::Q4_1 => ("Q4_1", 3, 32, 20),
            Dtype::Q5_0 => ("Q5_0", 6, 32, 22),
            Dtype::Q5_1 => ("Q5_1", 7, 32, 24),
            Dtype::Q8_0 => ("Q8_0", 8, 32, 34),
            Dtype::Q2K => ("Q2_K", 10, 256, 84),
            Dtype::Q3K => ("Q3_K", 11, 256, 110),
            Dtype::Q4K => ("Q4_K", 12, 256, 144),
            Dtype::Q5K => ("Q5_K", 13, 256, 176),
            Dtype::Q6K => ("Q6_K", 14, 256, 210),
            Dtype::IQ4NL => ("IQ4_NL", 20, 32, 18),
        }
    }

    /// As GGUF spells it.
    pub fn name(self) -> &'static str {
        self.facts().0
    }

    /// The dtype of ggml's type `id`, if it is read here.
    pub fn of_ggml(id: u32) -> Option<Dtype> {
        Dtype::ALL.into_iter().find(|dtype| dtype.facts().1 == id)
    }

    /// Numbers and bytes of a block: the least that can stand alone.
    pub fn block(self) -> (usize, usize) {
        let (_, _, numbers, bytes) = self.facts();
        (numbers, bytes)
    }

    /// Bytes of `cols` numbers; none if that is not a whole number of blocks, or past what can be counted.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        let (numbers, bytes) = self.block();
        if cols.is_multiple_of(numbers) { (cols / numbers).checked_mul(bytes) } else { None }
    }

    /// `value` as the nearest number of this dtype, F16 or BF16, ties to even, in its bytes; `value` itself when it is finite and they cannot
    /// be.
    ///
    /// # Panics
    /// For other dtypes.
    pub fn round(self, value: f32) -> Result<[u8; 2], f32> {
        let (bits, finite) = match self {
            Dtype::F16 => (half::f16::from_f32(value).to_bits(), half::f16::from_f32(value).is_finite()),
            Dtype::BF16 => (half::bf16::from_f32(value).to_bits(), half::bf16::from_f32(value).is_finite()),
            other => panic!("{} is not a dtype that is rounded to", other.name()),
        };
        if value.is_finite() && !finite { Err(value) } else { Ok(bits.to_le_bytes()) }
    }
}

/// A dense f32 matrix, row-major `[rows, cols]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Matrix {
    pub rows: usize,
    pub cols: usize,
    pub data: Vec<f32>,
}

impl Matrix {
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Matrix { rows, cols, data: vec![0.0; rows * cols] }
    }

    pub fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.cols..(row + 1) * self.cols]
    }

    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.data[row * self.cols..(row + 1) * self.cols]
    }
}

/// A borrowed weight matrix in the dtype and the place of the file, little-endian, row-major `[out, in]`, at any alignment.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    bytes: &'a [u8],
    pub dtype: Dtype,
    pub rows: usize,
    pub cols: usize,
    row_bytes: usize,
}

impl<'a> Weights<'a> {
    /// # Panics
    /// If `bytes` is not exactly `[rows, cols]` numbers of `dtype`, every row in whole blocks: the kernels read through a raw pointer
    /// and rely on it.
    pub fn new(bytes: &'a [u8], dtype: Dtype, rows: usize, cols: usize) -> Self {
        let row_bytes = dtype.row_bytes(cols).unwrap_or_else(|| panic!("a row of {cols} numbers is not whole blocks of {}", dtype.name()));
        assert_eq!(Some(bytes.len()), rows.checked_mul(row_bytes), "weight bytes do not fill [{rows}, {cols}]");
        Weights { bytes, dtype, rows, cols, row_bytes }
    }

    /// f32 numbers in memory, seen as weights `[rows, cols]`.
    pub fn of_f32(numbers: &'a [f32], rows: usize, cols: usize) -> Self {
        // SAFETY: any four bytes of an f32 slice are four bytes; u8 has no alignment.
        let bytes = unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast::<u8>(), size_of_val(numbers)) };
        Weights::new(bytes, Dtype::F32, rows, cols)
    }

    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    pub(crate) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Where row `row` begins; for `rows` itself, the end.
    pub(crate) fn row_ptr(&self, row: usize) -> *const u8 {
        self.bytes[row * self.row_bytes..].as_ptr()
    }

    /// Row `row`, widened exactly into `out` `[cols]`.
    pub fn widen_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols);
        let bytes = &self.bytes[row * self.row_bytes..(row + 1) * self.row_bytes];
        match self.dtype {
            Dtype::F32 => {
                for (out, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *out = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
            }
            Dtype::F16 => {
                for (out, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *out = half::f16::from_le_bytes([b[0], b[1]]).to_f32();
                }
            }
            Dtype::BF16 => {
                for (out, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *out = half::bf16::from_le_bytes([b[0], b[1]]).to_f32();
                }
            }
            Dtype::Q4_0 => quant::each(bytes, out, quant::legacy::q4_0),
            Dtype::Q4_1 => quant::each(bytes, out, quant::legacy::q4_1),
            Dtype::Q5_0 => quant::each(bytes, out, quant::legacy::q5_0),
            Dtype::Q5_1 => quant::each(bytes, out, quant::legacy::q5_1),
            Dtype::Q8_0 => quant::each(bytes, out, quant::legacy::q8_0),
            Dtype::Q2K => quant::each(bytes, out, quant::k::q2_k),
            Dtype::Q3K => quant::each(bytes, out, quant::k::q3_k),
            Dtype::Q4K => quant::each(bytes, out, quant::k::q4_k),
            Dtype::Q5K => quant::each(bytes, out, quant::k::q5_k),
            Dtype::Q6K => quant::each(bytes, out, quant::k::q6_k),
            Dtype::IQ4NL => quant::each(bytes, out, quant::iq4::iq4_nl),
        }
    }
}

/// Some columns of every row of a matrix that several threads write at once, each its own columns or rows.
pub struct Panel<'a> {
    data: *mut f32,
    pub rows: usize,
    /// Distance between rows, in numbers.
    pub stride: usize,
    pub columns: std::ops::Range<usize>,
    owner: std::marker::PhantomData<&'a mut [f32]>,
}

impl<'a> Panel<'a> {
    /// The whole of a matrix `[rows, cols]`.
    pub fn whole(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols);
        Panel { data: data.as_mut_ptr(), rows, stride: cols, columns: 0..cols, owner: std::marker::PhantomData }
    }

    /// Columns `0..columns` of `rows` rows that begin `stride` numbers apart.
    pub fn strided(data: &'a mut [f32], rows: usize, stride: usize, columns: usize) -> Self {
        assert!(columns <= stride && (rows == 0 || (rows - 1) * stride + columns <= data.len()));
        Panel { data: data.as_mut_ptr(), rows, stride, columns: 0..columns, owner: std::marker::PhantomData }
    }

    /// Columns `columns` of a wider matrix, kept apart in `data` `[rows, columns]`.
    pub fn apart(data: &'a mut [f32], rows: usize, columns: std::ops::Range<usize>) -> Self {
        assert_eq!(data.len(), rows * columns.len());
        let stride = columns.len();
        Panel { data: data.as_mut_ptr().wrapping_sub(columns.start), rows, stride, columns, owner: std::marker::PhantomData }
    }

    /// Columns `columns` of row `row`.
    pub fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows);
        // SAFETY: inside the matrix, and no other panel holds these columns of this row (see `Shared::panel`).
        unsafe { std::slice::from_raw_parts_mut(self.data.wrapping_add(row * self.stride + self.columns.start), self.columns.len()) }
    }

    /// Where row `row`, column `column` (counted in the whole matrix) lies.
    pub(crate) fn at(&mut self, row: usize, column: usize) -> *mut f32 {
        debug_assert!(row < self.rows && self.columns.contains(&column));
        self.data.wrapping_add(row * self.stride + column)
    }
}

/// A matrix lent to several threads, which take disjoint panels of it.
#[derive(Clone, Copy)]
pub struct Shared<'a> {
    data: *mut f32,
    rows: usize,
    cols: usize,
    owner: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: the pointer is only read through panels, whose takers promise that they are disjoint.
unsafe impl Send for Shared<'_> {}
// SAFETY: as above.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols);
        Shared { data: data.as_mut_ptr(), rows, cols, owner: std::marker::PhantomData }
    }

    /// # Safety
    /// No two panels alive at the same time may share a number.
    pub unsafe fn panel(&self, rows: std::ops::Range<usize>, columns: std::ops::Range<usize>) -> Panel<'a> {
        assert!(rows.start <= rows.end && rows.end <= self.rows && columns.start <= columns.end && columns.end <= self.cols);
        let data = self.data.wrapping_add(rows.start * self.cols);
        Panel { data, rows: rows.len(), stride: self.cols, columns, owner: std::marker::PhantomData }
    }
}
